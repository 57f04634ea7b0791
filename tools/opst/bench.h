// opst bench, check and plan have a subcommand per operator, and for a whole model.
#pragma once

#include "command.h"

namespace opst::tools {

void add_bench_attention(CLI::App& bench);
void add_bench_matmul(CLI::App& bench);
void add_bench_model(CLI::App& bench);
void add_bench_moe(CLI::App& bench);
void add_bench_tables(CLI::App& bench);
void add_check_attention(CLI::App& check);
void add_check_matmul(CLI::App& check);
void add_check_moe(CLI::App& check);
void add_plan_attention(CLI::App& plan);
void add_plan_kv(CLI::App& plan);
void add_plan_layer(CLI::App& plan);
void add_plan_matmul(CLI::App& plan);
void add_plan_memory(CLI::App& plan);
void add_plan_model(CLI::App& plan);
void add_plan_moe(CLI::App& plan);

}  // namespace opst::tools
