// opst: runs a language model through the library's operators, measures and explains them.
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

#include "bench.h"
#include "command.h"
#include "command_line.h"

namespace {

int fail(const std::string& name, int exit_code, std::string message) {
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::fprintf(stderr, "%s: %s\n", name.c_str(), opst::tools::printable(message).c_str());
  return exit_code;
}

int run(int argc, char** argv) {
  CLI::App app("Transformer operators for CPUs: run a language model through them, measure them, explain them.",
               "opst");
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", OPST_VERSION);
  app.footer(
      "Environment: OPST_ISA=generic|avx2|avx512|avx512_vnni|avx512_bf16 caps the instruction set level,\n"
      "OPST_NUM_THREADS=N, OPST_BF16=dot|widen pins how bf16 products are formed.\n"
      "Exit codes: 0 done, 1 failed while running, 2 wrong command line, environment or prompt.");
  opst::tools::add_generate(app);
  opst::tools::add_chat(app);
  opst::tools::add_perplexity(app);
  opst::tools::add_tokenize(app);
  opst::tools::add_info(app);
  CLI::App* bench = app.add_subcommand("bench", "Measure an operator, or a model");
  CLI::App* check = app.add_subcommand("check", "Compare an operator with float64");
  CLI::App* plan = app.add_subcommand("plan", "Explain what an operator, or a model, would do");
  for (CLI::App* parent : {bench, check, plan}) parent->require_subcommand(1);
  opst::tools::add_bench_attention(*bench);
  opst::tools::add_bench_matmul(*bench);
  opst::tools::add_bench_model(*bench);
  opst::tools::add_bench_moe(*bench);
  opst::tools::add_bench_tables(*bench);
  opst::tools::add_check_attention(*check);
  opst::tools::add_check_matmul(*check);
  opst::tools::add_check_moe(*check);
  opst::tools::add_plan_attention(*plan);
  opst::tools::add_plan_kv(*plan);
  opst::tools::add_plan_layer(*plan);
  opst::tools::add_plan_matmul(*plan);
  opst::tools::add_plan_memory(*plan);
  opst::tools::add_plan_model(*plan);
  opst::tools::add_plan_moe(*plan);
  const std::string name = opst::tools::command_name(app, argc, argv);
  try {
    std::vector<std::string> arguments = opst::tools::own_names(app, argc, argv);
    try {
      app.parse(arguments);
      if (app.get_subcommands().empty()) opst::tools::usage_error("a subcommand is required; see opst --help");
    } catch (const CLI::CallForVersion& version) {
      opst::tools::write_output(std::string(version.what()) + "\n");
    } catch (const CLI::CallForHelp&) {
      opst::tools::write_output(app.help());
    }
    return 0;
  } catch (const CLI::ParseError& error) {
    return fail(name, 2, opst::tools::what_is_wrong(app, error));
  } catch (const opst::tools::CommandError& error) {
    return fail(name, error.exit_code(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(name, 1, "out of memory");
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error of the write, not of the process
  // What run() does not catch happened while it made the command line, or a message: what follows needs no memory.
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("opst: out of memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "opst: %s\n", error.what());
  }
  return 1;
}
