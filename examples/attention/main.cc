#include <cstdio>

#include "opst/context.h"

int main() {
  opst::Result<opst::Context> context = opst::Context::create();
  if (!context.ok()) {
    std::fprintf(stderr, "%s\n", context.status().message().c_str());
    return 1;
  }
  std::printf("%s\n", opst::to_string(context.value().machine()).c_str());
}
