#include "matmul_case.h"

#include <algorithm>

#include "testing/random.h"

namespace opst::tools {

void add_weight_types_option(CLI::App& command, std::vector<std::string>& dtypes) {
  std::vector<std::string> names;
  std::string type_name;
  for (int i = 0; i < kNumQuantFormats; ++i) {
    names.emplace_back(to_string(static_cast<QuantFormat>(i)));
    type_name += (i > 0 ? "|" : "") + names.back();
  }
  for (const char* name : {"i8", "i4"}) {
    names.emplace_back(name);
    type_name += "|" + names.back();
  }
  add_list(command, "--dtype", dtypes,
           "Types of the weight, separated by commas. i8, i4: times x in int8; else x is f32, or the weight's",
           one_of(names))
      ->type_name(type_name);
}

void add_matmul_options(CLI::App& command, MatmulArguments& arguments) {
  const auto add_sizes = [&](const char* name, std::vector<int64_t>& sizes, const char* help) {
    add_list(command, name, sizes, help, at_least(1))->type_name("N");
  };
  add_sizes("--m", arguments.m, "Rows of x, separated by commas");
  add_sizes("--n", arguments.n, "Outputs, separated by commas");
  add_sizes("--k", arguments.k, "Inputs, separated by commas");
  add_weight_types_option(command, arguments.dtypes);
  add_threads_option(command, arguments.num_threads);
  command.add_flag("--json", arguments.json, "Print one JSON object");
}

void add_group_options(CLI::App& command, GroupedArguments& arguments) {
  CLI::Option* groups = command
                            .add_option("--groups", arguments.groups,
                                        "Grouped products: so many groups of m rows, each with a weight of its own")
                            ->check(between(1, 4096))
                            ->type_name("E");
  CLI::Option* ragged =
      command.add_flag("--ragged", arguments.ragged, "Groups have 1 to 2 m - 1 rows, drawn from a fixed seed")
          ->needs(groups);
  add_list(command, "--rows", arguments.rows,
           "Grouped products: the rows of each group, separated by commas; instead of --groups and --m",
           between(0, 1 << 24))
      ->type_name("N")
      ->excludes(groups)
      ->excludes(ragged);
}

void settle_groups(GroupedArguments& arguments) {
  if (arguments.rows.empty()) return;
  arguments.m = {*std::max_element(arguments.rows.begin(), arguments.rows.end())};
  if (arguments.m[0] == 0) usage_error("--rows: every group is empty");
}

std::vector<int64_t> group_ends(const GroupedArguments& arguments, int64_t m) {
  test::Random random(2);
  std::vector<int64_t> ends;
  int64_t end = 0;
  const auto count = arguments.rows.empty() ? arguments.groups : static_cast<int64_t>(arguments.rows.size());
  for (int64_t e = 0; e < count; ++e) {
    end += !arguments.rows.empty() ? arguments.rows[static_cast<size_t>(e)]
           : arguments.ragged      ? random.integer(1, std::max<int64_t>(1, 2 * m - 1))
                                   : m;
    ends.push_back(end);
  }
  return ends;
}

std::string group_words(const GroupedArguments& arguments) {
  const std::string groups = ", " + std::to_string(arguments.groups) + " groups of ";
  if (!arguments.rows.empty()) return ", " + std::to_string(arguments.rows.size()) + " groups of given rows";
  return arguments.groups == 0 ? "" : groups + (arguments.ragged ? "1 to 2 m - 1 rows" : "m rows");
}

void check_products(const MatmulArguments& arguments) {
  for (const std::string& dtype : arguments.dtypes) {
    const int64_t block = is_integers(dtype) ? 1 : block_values(parse_quant_format(dtype).value());
    for (const int64_t k : arguments.k) {
      if (k % block != 0) {
        usage_error("k is " + std::to_string(k) + ", but " + dtype + " has blocks of " + std::to_string(block) +
                    " values");
      }
      if (dtype == "i4" && k % 2 != 0) usage_error("k is " + std::to_string(k) + ", but i4 has two values to a byte");
    }
  }
}

void for_each_product(const MatmulArguments& arguments,
                      const std::function<void(const std::string& dtype, const MatmulShape& shape)>& body) {
  for (const std::string& dtype : arguments.dtypes) {
    for (const int64_t k : arguments.k) {
      for (const int64_t n : arguments.n) {
        for (const int64_t m : arguments.m) body(dtype, {m, n, k});
      }
    }
  }
}

bool is_integers(const std::string& dtype) { return dtype == "i8" || dtype == "i4"; }

DType x_dtype_of(const std::string& dtype) {
  return is_integers(dtype) ? DType::i8 : dtype == "bf16" ? DType::bf16 : dtype == "f16" ? DType::f16 : DType::f32;
}

MatmulProblem matmul_case(const std::string& dtype, const MatmulShape& shape) {
  MatmulProblem problem = {.m = shape.m, .n = shape.n, .k = shape.k, .x_dtype = x_dtype_of(dtype)};
  if (is_integers(dtype)) {
    problem.weight = MatmulWeight::integers;
    problem.bits = dtype == "i8" ? 8 : 4;
    problem.has_x_scales = true;
  } else {
    problem.format = parse_quant_format(dtype).value();
  }
  return problem;
}

}  // namespace opst::tools
