// Runs the built program, for its tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace opst::tools {

struct Outcome {
  int exit_code = -1;  // 128 + n: ended by signal n
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, false); }
};

struct RunOptions {
  std::vector<std::string> environment = {};  // "NAME=value"
  bool close_stdin = false;
  std::string input_path = "/dev/null";  // what standard input is
  // What standard output is; default: read into Outcome::out.
  enum class Output : uint8_t { captured, closed_pipe, full_disk, closed } output = Output::captured;
  // Gets what each read from standard output gives: what the program wrote before it flushed.
  std::function<void(const std::string&)> on_read = {};
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

// A folder that disappears with it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    char pattern[] = "/tmp/opst_test_XXXXXX";
    path_ = mkdtemp(pattern);
  }
  ~TemporaryFolder() { (void)!system(("rm -rf " + path_).c_str()); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

 private:
  std::string path_;
};

inline Outcome run_program(const std::vector<std::string>& arguments, const RunOptions& options = {}) {
  const TemporaryFolder folder;
  const std::string err_path = folder.path("err");
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const bool nobody_reads = options.output == RunOptions::Output::closed_pipe;
  if (nobody_reads) close(ends[0]);
  const pid_t child = fork();
  if (child == 0) {
    using Output = RunOptions::Output;
    if (options.output == Output::captured || options.output == Output::closed_pipe) dup2(ends[1], STDOUT_FILENO);
    if (options.output == Output::full_disk) dup2(open("/dev/full", O_WRONLY), STDOUT_FILENO);
    dup2(open(err_path.c_str(), O_WRONLY | O_CREAT, 0600), STDERR_FILENO);
    if (options.close_stdin) {
      close(STDIN_FILENO);
    } else {
      dup2(open(options.input_path.c_str(), O_RDONLY), STDIN_FILENO);
    }
    if (options.output == Output::closed) close(STDOUT_FILENO);  // the last: nothing else may get its number
    for (const std::string& variable : options.environment) putenv(const_cast<char*>(variable.c_str()));
    std::vector<char*> argv = {const_cast<char*>("opst")};
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    execv(OPST_PROGRAM_PATH, argv.data());
    _exit(126);
  }
  close(ends[1]);
  Outcome outcome;
  std::string buffer(1 << 20, '\0');
  for (ssize_t got; !nobody_reads && (got = read(ends[0], buffer.data(), buffer.size())) > 0;) {
    const std::string piece = buffer.substr(0, static_cast<size_t>(got));
    if (options.on_read) options.on_read(piece);
    outcome.out += piece;
  }
  if (!nobody_reads) close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.err = read_file(err_path);
  return outcome;
}

}  // namespace opst::tools
