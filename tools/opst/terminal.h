// Terminal: lines from a person at a terminal, of any length, and Ctrl-C as an event.
//
//   Terminal terminal;                                   // standard input and standard error are a terminal
//   while (terminal.read_line("> ", line) == Terminal::Event::line) {
//     terminal.forget_interrupts();
//     while (!terminal.interrupted()) ...                // Ctrl-C ends this loop and not the program
//   }
//
// The terminal's own line editing holds 4095 bytes and drops what is beyond, so this class edits lines itself: erase a
// character, a word, the line. Until its destructor the terminal gives every byte at once and echoes none; what ends or
// stops the process on the way puts it back first. What is typed meanwhile waits for the next read_line.
#pragma once

#include <termios.h>

#include <string>
#include <string_view>

namespace opst::tools {

class Terminal {
 public:
  // One at a time: signal handlers know it.
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  enum class Event : uint8_t {
    line,       // `line` without its end
    interrupt,  // Ctrl-C; `line` is what had been typed
    end,        // Ctrl-D on an empty line, or the terminal is gone
  };
  // Shows the prompt and what is typed, on standard error.
  Event read_line(std::string_view prompt, std::string& line);

  // Whether Ctrl-C was pressed since.
  void forget_interrupts();
  bool interrupted() const;

 private:
  enum class Input : uint8_t { byte, nothing, interrupt, resumed, end };
  // The next byte, waiting for it at most so long; -1: for ever.
  Input next(int timeout_ms, unsigned char& byte);
  void skip_escape_sequence();

  std::string typed_;  // read, not yet used
  size_t used_ = 0;
};

}  // namespace opst::tools
