// The program at a terminal, for its tests: both ends of a pseudo-terminal are ours.
//
//   PseudoTerminal terminal({"chat", "-m", model});
//   terminal.wait_for("> ");
//   terminal.type("hello\r");
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace opst::tools {

class PseudoTerminal {
 public:
  // False where the system gives none: /dev/pts is not mounted in a bare chroot. Tests skip then, with kMissing.
  static bool available() {
    const int ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    const bool granted = ours >= 0 && grantpt(ours) == 0;
    if (ours >= 0) close(ours);
    return granted;
  }
  static constexpr const char* kMissing = "no pseudo-terminal can be had: is /dev/pts mounted?";

  // All three standard streams of the program are the terminal.
  explicit PseudoTerminal(const std::vector<std::string>& arguments) {
    ours_ = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    EXPECT_EQ(grantpt(ours_), 0);
    EXPECT_EQ(unlockpt(ours_), 0);
    const std::string name = ptsname(ours_);
    child_ = fork();
    if (child_ == 0) {
      setsid();
      const int theirs = open(name.c_str(), O_RDWR);
      ioctl(theirs, TIOCSCTTY, 0);
      for (int stream = 0; stream < 3; ++stream) dup2(theirs, stream);
      close(theirs);
      std::vector<char*> argv = {const_cast<char*>("opst")};
      for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
      argv.push_back(nullptr);
      execv(OPST_PROGRAM_PATH, argv.data());
      _exit(126);
    }
    // Held open, so that the terminal outlives the program.
    theirs_ = open(name.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC);
  }
  ~PseudoTerminal() {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    close(ours_);
    close(theirs_);
  }
  PseudoTerminal(const PseudoTerminal&) = delete;
  PseudoTerminal& operator=(const PseudoTerminal&) = delete;

  // Reads on while the program does not take it.
  void type(std::string_view keys) {
    while (!keys.empty()) {
      pollfd end = {ours_, POLLIN | POLLOUT, 0};
      if (poll(&end, 1, kPatienceMs) <= 0) {
        ADD_FAILURE() << "the program does not read";
        return;
      }
      if ((end.revents & POLLIN) != 0) read_some();
      if ((end.revents & POLLOUT) == 0) continue;
      const ssize_t written = write(ours_, keys.data(), std::min<size_t>(keys.size(), 256));
      if (written > 0) keys.remove_prefix(static_cast<size_t>(written));
    }
  }

  // Waits for a text behind the one that was last waited for; gives what stands between them. "\n" is "\r\n" here.
  std::string wait_for(const std::string& text) {
    for (;;) {
      if (const size_t at = screen_.find(text, seen_); at != std::string::npos) {
        const std::string between = screen_.substr(seen_, at - seen_);
        seen_ = at + text.size();
        return between;
      }
      if (!read_within(kPatienceMs)) {
        ADD_FAILURE() << "waited in vain for " << testing::PrintToString(text) << ", there is "
                      << testing::PrintToString(screen_.substr(seen_));
        return "";
      }
    }
  }
  // Waits until so many more bytes have come.
  void wait_for_bytes(size_t count) {
    const size_t enough = screen_.size() + count;
    while (screen_.size() < enough) {
      if (!read_within(kPatienceMs)) {
        ADD_FAILURE() << "the program writes no more";
        return;
      }
    }
  }

  void send_signal(int signal_number) const { kill(child_, signal_number); }
  // 128 + n: ended by signal n.
  int wait_for_exit() {
    int status = 0;
    while (waitpid(child_, &status, WNOHANG) == 0) {
      if (!read_within(10) && ++idle_ > kPatienceMs / 10) {
        ADD_FAILURE() << "the program does not end";
        return -1;
      }
    }
    child_ = -1;
    while (read_within(0)) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  // Whether the terminal gives whole lines and shows what is typed, as a shell leaves it.
  bool edits_and_echoes() const {
    termios modes;
    tcgetattr(theirs_, &modes);
    return (modes.c_lflag & ICANON) != 0 && (modes.c_lflag & ECHO) != 0;
  }
  const std::string& screen() const { return screen_; }

 private:
  static constexpr int kPatienceMs = 120'000;

  bool read_within(int timeout_ms) {
    pollfd end = {ours_, POLLIN, 0};
    return poll(&end, 1, timeout_ms) > 0 && read_some();
  }
  bool read_some() {
    char bytes[4096];
    const ssize_t got = read(ours_, bytes, sizeof bytes);
    if (got > 0) screen_.append(bytes, static_cast<size_t>(got));
    return got > 0;
  }

  int ours_ = -1, theirs_ = -1, idle_ = 0;
  pid_t child_ = -1;
  std::string screen_;
  size_t seen_ = 0;
};

}  // namespace opst::tools
