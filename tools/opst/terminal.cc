#include "terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "model/utf8.h"

namespace opst::tools {

namespace {

// What signal handlers use: any thread of the process may run them.
termios as_found;                   // the terminal's modes before
termios ours;                       // every byte at once, no echo
std::atomic<bool> was_interrupted;  // by Ctrl-C
int wake_up[2] = {-1, -1};          // a pipe that ends read_line's waiting: one byte a signal
constexpr char kInterrupt = 'i', kResumed = 'r';
constexpr int kStopping[] = {SIGTSTP, SIGTTIN};
constexpr int kEnding[] = {SIGTERM, SIGHUP, SIGQUIT};

void wake(char reason) { (void)!write(wake_up[1], &reason, 1); }

void on_interrupt(int) {
  const int saved = errno;
  was_interrupted = true;
  wake(kInterrupt);
  errno = saved;
}

// Lets the signal do what it does by default.
void take_default(int signal_number) {
  signal(signal_number, SIG_DFL);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal_number);
  raise(signal_number);
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);  // it comes here
}

void on_end(int signal_number) {
  tcsetattr(STDIN_FILENO, TCSANOW, &as_found);
  take_default(signal_number);
}

void handle(int signal_number, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // of writes; poll returns all the same
  sigaction(signal_number, &action, nullptr);
}

bool in_foreground() { return tcgetpgrp(STDIN_FILENO) == getpgrp(); }

void on_stop(int signal_number) {
  const int saved = errno;
  // From the background this would stop the process again.
  if (in_foreground()) tcsetattr(STDIN_FILENO, TCSANOW, &as_found);
  take_default(signal_number);
  // Here it has been continued.
  handle(signal_number, on_stop);
  if (in_foreground()) tcsetattr(STDIN_FILENO, TCSANOW, &ours);
  wake(kResumed);
  errno = saved;
}

void show(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno != EINTR) return;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

// Takes the last character away, and its columns from the screen.
void erase_character(std::string& line, std::string& echo) {
  size_t begin = line.size() - 1;
  while (begin > 0 && (line[begin] & 0xC0) == 0x80) --begin;
  const model::Utf8Char last = model::first_char(std::string_view(line).substr(begin));
  const int columns = last.state == model::Utf8Char::State::complete ? model::display_columns(last.value) : 1;
  for (int i = 0; i < columns; ++i) echo += "\b \b";
  line.resize(begin);
}

}  // namespace

Terminal::Terminal() {
  tcgetattr(STDIN_FILENO, &as_found);
  ours = as_found;
  ours.c_lflag &= static_cast<tcflag_t>(~(ICANON | ECHO | IEXTEN));
  ours.c_cc[VMIN] = 1;
  ours.c_cc[VTIME] = 0;
  (void)!pipe2(wake_up, O_CLOEXEC | O_NONBLOCK);
  forget_interrupts();
  handle(SIGINT, on_interrupt);
  for (const int signal_number : kStopping) handle(signal_number, on_stop);
  for (const int signal_number : kEnding) handle(signal_number, on_end);
  tcsetattr(STDIN_FILENO, TCSADRAIN, &ours);
}

Terminal::~Terminal() {
  tcsetattr(STDIN_FILENO, TCSADRAIN, &as_found);
  signal(SIGINT, SIG_DFL);
  for (const int signal_number : kStopping) signal(signal_number, SIG_DFL);
  for (const int signal_number : kEnding) signal(signal_number, SIG_DFL);
  for (int& end : wake_up) {
    close(end);
    end = -1;
  }
}

void Terminal::forget_interrupts() {
  char reasons[64];
  while (read(wake_up[0], reasons, sizeof reasons) > 0) {
  }
  was_interrupted = false;
}

bool Terminal::interrupted() const { return was_interrupted; }

Terminal::Input Terminal::next(int timeout_ms, unsigned char& byte) {
  while (used_ == typed_.size()) {
    pollfd sources[2] = {{STDIN_FILENO, POLLIN, 0}, {wake_up[0], POLLIN, 0}};
    const int ready = poll(sources, 2, timeout_ms);
    if (ready == 0) return Input::nothing;
    if (ready < 0 && errno != EINTR) return Input::end;
    char reason = 0;
    if (read(wake_up[0], &reason, 1) == 1) return reason == kInterrupt ? Input::interrupt : Input::resumed;
    if (ready < 0 || sources[0].revents == 0) continue;
    typed_.resize(1 << 16);
    used_ = 0;
    const ssize_t got = read(STDIN_FILENO, typed_.data(), typed_.size());
    typed_.resize(got > 0 ? static_cast<size_t>(got) : 0);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return Input::end;
  }
  byte = static_cast<unsigned char>(typed_[used_++]);
  return Input::byte;
}

// Arrow keys and the like: ESC [ ... letter, ESC O letter; a lone ESC is followed by nothing.
void Terminal::skip_escape_sequence() {
  constexpr int kWithinSequenceMs = 20;
  unsigned char byte = 0;
  if (next(kWithinSequenceMs, byte) != Input::byte || (byte != '[' && byte != 'O')) return;
  while (next(kWithinSequenceMs, byte) == Input::byte && (byte < 0x40 || byte > 0x7E)) {
  }
}

Terminal::Event Terminal::read_line(std::string_view prompt, std::string& line) {
  forget_interrupts();
  line.clear();
  show(prompt);
  std::string echo;
  for (;;) {
    // One write for all that has arrived.
    if (used_ == typed_.size()) {
      show(echo);
      echo.clear();
    }
    unsigned char byte = 0;
    const Input input = next(-1, byte);
    const auto is_key = [&](int index) {
      return as_found.c_cc[index] != _POSIX_VDISABLE && byte == as_found.c_cc[index];
    };
    if (input == Input::interrupt) {
      show("^C\n");
      used_ = typed_.size();
      return Event::interrupt;
    }
    if (input == Input::end) {
      show("\n");
      return Event::end;
    }
    if (input == Input::resumed) {
      show(prompt);
      show(line);
    } else if (byte == '\n' || byte == '\r') {
      show(echo + "\n");
      return Event::line;
    } else if (is_key(VEOF)) {
      if (!line.empty()) continue;
      show(echo + "\n");
      return Event::end;
    } else if (is_key(VERASE) || byte == 0x7F || byte == '\b') {
      if (!line.empty()) erase_character(line, echo);
    } else if (is_key(VWERASE)) {
      while (!line.empty() && line.back() == ' ') erase_character(line, echo);
      while (!line.empty() && line.back() != ' ') erase_character(line, echo);
    } else if (is_key(VKILL)) {
      while (!line.empty()) erase_character(line, echo);
    } else if (byte == 0x1B) {
      skip_escape_sequence();
    } else if (byte == '\t') {
      line += ' ';
      echo += ' ';
    } else if (byte >= 0x20) {
      line += static_cast<char>(byte);
      echo += static_cast<char>(byte);
    }
  }
}

}  // namespace opst::tools
