// The command line as users write it: names that they bring from other programs, and what is wrong with the rest.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace opst::tools {

// "opst generate": the program with the subcommands that the arguments name.
std::string command_name(const CLI::App& app, int argc, char** argv);

// The arguments for CLI::App::parse(vector), which takes them backwards. The names that llama.cpp has for options of
// the subcommand become ours (--temp: --temperature). One that stands for something else here, or for nothing, is a
// usage error that says so.
std::vector<std::string> own_names(const CLI::App& app, int argc, char** argv);

// An error of parsing in one line: options and arguments that nobody knows in the order in which they were given, and
// the subcommands to choose from where one is missing.
std::string what_is_wrong(const CLI::App& app, const CLI::ParseError& error);

}  // namespace opst::tools
