// opst plan attention --machine: tiles, places, traffic, times and the end of memory on a described machine.
#include "plan_machine.h"

#include <cstdio>

#include "attention_outlook.h"
#include "system_memory.h"

namespace opst::tools {

namespace {

struct Place {
  const char* what;
  double bytes;
  std::string level;
};

// The nearest level that holds so many bytes; of a level of cores, one core's.
std::string level_for(double bytes, const MachineProfile& m) {
  for (const MemoryLevel& level : m.levels) {
    if (bytes <= level.bytes.value) return level.name;
  }
  return "nowhere";
}

std::vector<Place> places_of(const AttentionProblem& p, const TileSize& tile, const MachineProfile& m) {
  const auto bytes = [](int64_t rows, int64_t columns, int64_t element) {
    return static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(element);
  };
  const int64_t in = size_bytes(p.query_dtype);
  std::vector<Place> places = {
      {"queries of a tile", bytes(tile.block_q, p.head_dim, in), ""},
      {"keys and values of a tile", bytes(tile.block_kv, p.head_dim + p.value_head_dim, in), ""},
      {"scores of a tile", bytes(tile.block_q, tile.block_kv, 4), ""},
      {"sums of a tile", bytes(tile.block_q, p.value_head_dim, 4), ""},
      {"keys and values of a head", bytes(p.kv_len, p.head_dim + p.value_head_dim, in), ""},
      {"scores of a head, standard", bytes(p.query_len, p.kv_len, in), ""}};
  for (Place& place : places) place.level = level_for(place.bytes, m);
  return places;
}

std::string rule_text(const AttentionProblem& p, const AttentionOutlook& look, const MachineProfile& m) {
  const auto tile_text = [](const TileSize& t) {
    return std::to_string(t.block_q) + " x " + std::to_string(t.block_kv);
  };
  const auto choice_text = [&](const TileChoice& c) {
    return tile_text(c.tile) + " needs " + binary_bytes(c.bytes) + " of " + binary_bytes(c.budget) +
           (c.fits ? "" : ": too much, but the smallest there is");
  };
  const double bytes = tile_bytes(look.tile, p.head_dim), turns = tile_bytes_in_turn(look.tile, p.head_dim);
  return "  tile        " + tile_text(look.tile) + ": " + look.tile_reason + "\n" +
         "  tile rule   2 d Br + 4 d Bc + 2 Br Bc <= " + m.tile_memory + " / heads: " + choice_text(look.by_rule) +
         "\n              one head at a time: " + choice_text(look.one_head) + "\n              " +
         tile_text(look.tile) + " at head_dim " + std::to_string(p.head_dim) + " needs " + binary_bytes(bytes) +
         " by the rule, " + binary_bytes(turns) +
         " with K and V in turn in one place,\n              2 (d Br + d Bc + Br Bc); an article that gives less for "
         "its own formula is wrong\n";
}

std::string form_text(const char* name, const AttentionForm& form, const MachineProfile& m, bool cpu) {
  std::string text = "  " + std::string(name);
  text.resize(14, ' ');
  text += "matrix " + human_seconds(form.matrix_seconds) + ", vector " + human_seconds(form.vector_seconds);
  for (size_t i = 0; i < m.levels.size(); ++i) {
    if (form.bytes[i] > 0)
      text +=
          ", " + m.levels[i].name + " " + binary_bytes(form.bytes[i]) + " in " + human_seconds(form.level_seconds[i]);
  }
  return text + "\n              bound by " + form.bound + "; predicted " + human_seconds(form.seconds) +
         (cpu ? "" : " (the units work at once)") + "; memory " + binary_bytes(form.memory_bytes) + ", which ends at " +
         std::to_string(form.longest) + " keys\n";
}

nlohmann::ordered_json to_json(const TileChoice& choice) {
  return {{"block_q", choice.tile.block_q},
          {"block_kv", choice.tile.block_kv},
          {"bytes", choice.bytes},
          {"budget_bytes", choice.budget},
          {"fits", choice.fits}};
}

nlohmann::ordered_json to_json(const AttentionForm& form, const MachineProfile& m) {
  nlohmann::ordered_json bytes, level_ms;
  for (size_t i = 0; i < m.levels.size(); ++i) {
    bytes[m.levels[i].name] = form.bytes[i];
    level_ms[m.levels[i].name] = form.level_seconds[i] * 1e3;
  }
  return {{"bytes", bytes},
          {"matrix_ms", form.matrix_seconds * 1e3},
          {"vector_ms", form.vector_seconds * 1e3},
          {"memory_ms", level_ms},
          {"bound", form.bound},
          {"predicted_ms", form.seconds * 1e3},
          {"memory_bytes", form.memory_bytes},
          {"memory_ends_at", form.longest}};
}

}  // namespace

std::string machine_text(const MachineProfile& m) {
  std::string text = "machine " + m.name + " (" + to_string(m.kind) + ", " + m.origin + ")\n  " +
                     std::to_string(static_cast<int64_t>(m.cores.value)) + " cores";
  char rates[160];
  std::snprintf(rates, sizeof rates, "; 16 bits %.4g GFLOP/s, f32 %.4g GFLOP/s; %.3g G softmax elements/s",
                m.matrix_bf16.value / 1e9, m.matrix_f32.value / 1e9, m.exponentials.value / 1e9);
  text += std::string(rates) + "\n  ";
  for (const MemoryLevel& level : m.levels) {
    char read[64];
    std::snprintf(read, sizeof read, " at %.4g GB/s", level.read.value / 1e9);
    text += (&level == m.levels.data() ? "" : "; ") + level.name + " " + binary_bytes(level.bytes.value) +
            (level.per_core ? " per core" : "") + read;
  }
  return text + "\n";
}

void plan_attention_on(const std::string& name, const AttentionArguments& arguments,
                       const MachinePlanOptions& options) {
  const std::vector<AttentionSetup> setups = attention_setups(arguments);
  if (setups.front().has_options()) {
    usage_error("--machine plans calls without options other than --causal; got" + options_text(arguments).substr(1));
  }
  const MachineProfile m = machine_profile(name, arguments.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!arguments.json) write_output(machine_text(m));
  const bool cpu = m.kind == MachineProfile::Kind::cpu;
  for (const AttentionSetup& setup : setups) {
    const AttentionProblem& p = setup.problem;
    const AttentionOutlook look =
        attention_outlook(p, visible_pairs(setup), m, {.train = options.train, .sram_heads = options.sram_heads});
    const std::vector<Place> places = places_of(p, look.tile, m);
    if (!arguments.json) {
      std::string text = std::to_string(p.kv_len) + " keys" + (options.train ? ", forward and backward" : "") + "\n" +
                         rule_text(p, look, m) + "  lies in     ";
      for (const Place& place : places) {
        text += std::string(&place == places.data() ? "" : ", ") + place.what + " " + binary_bytes(place.bytes) + ": " +
                place.level;
      }
      write_output(text + "\n" + form_text("flash", look.flash, m, cpu) + form_text("standard", look.standard, m, cpu));
      continue;
    }
    nlohmann::ordered_json where = nlohmann::ordered_json::array();
    for (const Place& place : places)
      where.push_back({{"what", place.what}, {"bytes", place.bytes}, {"level", place.level}});
    rows.push_back({{"kv_len", p.kv_len},
                    {"query_len", p.query_len},
                    {"block_q", look.tile.block_q},
                    {"block_kv", look.tile.block_kv},
                    {"tile_reason", look.tile_reason},
                    {"tile_bytes", tile_bytes(look.tile, p.head_dim)},
                    {"tile_bytes_in_turn", tile_bytes_in_turn(look.tile, p.head_dim)},
                    {"tile_rule", to_json(look.by_rule)},
                    {"tile_rule_one_head", to_json(look.one_head)},
                    {"places", where},
                    {"flops", look.flops},
                    {"flash", to_json(look.flash, m)},
                    {"standard", to_json(look.standard, m)}});
  }
  if (arguments.json) write_json({{"machine", to_json(m)}, {"train", options.train}, {"rows", rows}});
}

}  // namespace opst::tools
