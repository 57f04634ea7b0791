// The products of `opst bench|plan matmul`: sizes and types of the weight, as options and as a problem.
#pragma once

#include <functional>

#include "command.h"
#include "opst/matmul.h"

namespace opst::tools {

struct MatmulArguments {
  std::vector<int64_t> m = {1, 256}, n = {1024, 4096}, k = {2048};
  std::vector<std::string> dtypes = {"f32", "bf16"};
  int num_threads = 0;
  bool json = false;
};

// --dtype: the types of a weight.
void add_weight_types_option(CLI::App& command, std::vector<std::string>& dtypes);
void add_matmul_options(CLI::App& command, MatmulArguments& arguments);

struct GroupedArguments : MatmulArguments {
  int64_t groups = 0;         // of m rows each, with a weight of their own; 0: single products
  bool ragged = false;        // groups have 1 to 2 m - 1 rows
  std::vector<int64_t> rows;  // of each group, instead of both
};
// --groups, --ragged, --rows.
void add_group_options(CLI::App& command, GroupedArguments& arguments);
// Once the options are read: m is the most rows that --rows names.
void settle_groups(GroupedArguments& arguments);
// The rows of each group for a table's m, as cumulative ends; empty: a single product.
std::vector<int64_t> group_ends(const GroupedArguments& arguments, int64_t m);
// ", 8 groups of m rows"; nothing of single products.
std::string group_words(const GroupedArguments& arguments);

struct MatmulShape {
  int64_t m, n, k;
};

// A k that the blocks of one of the types do not divide is a usage error. Before anything is printed.
void check_products(const MatmulArguments& arguments);
// Every combination, in the order of a table's rows.
void for_each_product(const MatmulArguments& arguments,
                      const std::function<void(const std::string& dtype, const MatmulShape& shape)>& body);

// A weight of a float type or a quantised format, x of its own type or of f32; i8, i4: x of i8 with a scale per row.
bool is_integers(const std::string& dtype);
DType x_dtype_of(const std::string& dtype);
MatmulProblem matmul_case(const std::string& dtype, const MatmulShape& shape);

}  // namespace opst::tools
