// Grouped products of rows that come from, or go to, other ranks.
#pragma once

#include "mc2/rows.h"

namespace opst::mc2 {

// Products of tiles of rows, each of an expert of this rank.
struct GroupedProduct {
  Context& context;
  const GroupedWeight& weight;
  const GroupedExchangeOptions& options;
  int64_t* counts = nullptr;  // [E_r], of a tile

  // Rows [first, first + rows) of this rank's owned ones.
  Status operator()(const RowLists& lists, int rank, int64_t first, const ConstTensor& x, const ConstTensor& x_scales,
                    const Tensor& out) const;
  // That dtypes, n and k agree: the product of no rows.
  void check(ShapeCheck& check, const ConstTensor& x, const Tensor& out, int64_t experts) const;

 private:
  // By `counts`.
  Status multiply(int64_t experts, const ConstTensor& x, const ConstTensor& x_scales, const Tensor& out) const;
};

// x: rows sorted by expert, or by slot_of_row those of tokens. out [owned rows, n]
struct GroupedGatherCall {
  Mc2Operator op;
  ConstTensor x;
  Tensor out;
  const int64_t* slot_of_row = nullptr;
  int64_t top_k = 1;
};
Status run_grouped_gather(ShapeCheck& check, Communicator::Impl& communicator, const Entry& entry,
                          const RowLists& lists, const GroupedProduct& product, const GroupedGatherCall& call);

// x [owned rows, k], out [sent rows, n]. scratch: see scatter_tile_bytes
struct GroupedScatterCall {
  Mc2Operator op;
  ConstTensor x;
  Tensor out;
  Mc2Plan plan = {};
  char* scratch = nullptr;  // plan.tile_bytes
};
Status run_grouped_scatter(Communicator::Impl& communicator, const Entry& entry, const RowLists& lists,
                           const GroupedProduct& product, const GroupedScatterCall& call);

}  // namespace opst::mc2
