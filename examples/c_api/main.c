/* The C interface: a prompt's attention, then one more token against a paged cache, each in two phases. */
#include <opst/opst.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQ = 128, HEADS = 4, KV_HEADS = 2, DIM = 64, BLOCK = 32, BLOCKS = 5 };

/* Ends the program with the library's sentence. */
static void check(opst_status status) {
  if (status == OPST_OK) return;
  fprintf(stderr, "%s: %s\n", opst_status_name(status), opst_last_error());
  exit(1);
}

/* Some numbers between -1 and 1, the same each time. */
static void fill(float* data, int64_t count) {
  static uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
}

/* Memory [seq, heads, dim] as the view [1, heads, seq, dim]: layout is strides. */
static opst_tensor heads_of(float* data, int64_t seq, int64_t heads) {
  opst_tensor tensor;
  const int64_t shape[4] = {1, seq, heads, DIM};
  check(opst_tensor_contiguous(OPST_F32, 4, shape, data, &tensor));
  check(opst_tensor_transpose(&tensor, 1, 2));
  return tensor;
}

typedef opst_status (*run_function)(void*, int64_t, opst_executor*);

/* The second phase: in memory of ours, of the size that the first phase asked for. */
static void run(run_function function, int64_t workspace_bytes, opst_executor* executor) {
  void* workspace = NULL;
  if (workspace_bytes > 0) {
    workspace = aligned_alloc(OPST_WORKSPACE_ALIGNMENT, (size_t)workspace_bytes);
    if (workspace == NULL) exit(1);
  }
  check(function(workspace, workspace_bytes, executor));
  free(workspace);
  opst_executor_destroy(executor);
}

int main(void) {
  static float query[SEQ * HEADS * DIM], key[SEQ * KV_HEADS * DIM], value[SEQ * KV_HEADS * DIM];
  static float out[SEQ * HEADS * DIM], last_out[HEADS * DIM];
  fill(query, SEQ * HEADS * DIM);
  fill(key, SEQ * KV_HEADS * DIM);
  fill(value, SEQ * KV_HEADS * DIM);

  opst_context* context;
  check(opst_context_create(NULL, &context));
  int64_t workspace_bytes;
  opst_executor* executor;

  /* All queries of the prompt, causal. */
  const opst_tensor q = heads_of(query, SEQ, HEADS), o = heads_of(out, SEQ, HEADS);
  const opst_tensor k = heads_of(key, SEQ, KV_HEADS), v = heads_of(value, SEQ, KV_HEADS);
  opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
  opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
  opst_attention_options options = OPST_ATTENTION_OPTIONS;
  inputs.query = &q;
  inputs.key = &k;
  inputs.value = &v;
  outputs.out = &o;
  options.causal = 1;
  check(opst_flash_attention_workspace(context, &inputs, &outputs, &options, &workspace_bytes, &executor));
  run(opst_flash_attention, workspace_bytes, executor);

  /* Keys and values into pages, in any order of the blocks. */
  const opst_page_sizes sizes = {OPST_PAGES_NORM, OPST_F32, BLOCKS, BLOCK, KV_HEADS, DIM, DIM};
  int64_t key_bytes, value_bytes;
  check(opst_kv_pages_size(&sizes, &key_bytes, &value_bytes));
  void *key_memory = calloc(1, (size_t)key_bytes), *value_memory = calloc(1, (size_t)value_bytes);
  opst_tensor key_cache, value_cache;
  check(opst_kv_pages(&sizes, key_memory, key_bytes, value_memory, value_bytes, &key_cache, &value_cache));

  int32_t table[SEQ / BLOCK] = {4, 0, 3, 1};
  int64_t slots[SEQ], lengths[1] = {SEQ};
  for (int i = 0; i < SEQ; ++i) slots[i] = (int64_t)table[i / BLOCK] * BLOCK + i % BLOCK;
  const int64_t token_shape[3] = {SEQ, KV_HEADS, DIM}, slot_shape[1] = {SEQ}, table_shape[2] = {1, SEQ / BLOCK};
  const int64_t length_shape[1] = {1};
  opst_tensor key_rows, value_rows, slot_mapping, block_table, kv_lengths;
  check(opst_tensor_contiguous(OPST_F32, 3, token_shape, key, &key_rows));
  check(opst_tensor_contiguous(OPST_F32, 3, token_shape, value, &value_rows));
  check(opst_tensor_contiguous(OPST_I64, 1, slot_shape, slots, &slot_mapping));
  check(opst_tensor_contiguous(OPST_I32, 2, table_shape, table, &block_table));
  check(opst_tensor_contiguous(OPST_I64, 1, length_shape, lengths, &kv_lengths));
  check(opst_scatter_kv_cache_workspace(context, &key_rows, &value_rows, &slot_mapping, &key_cache, &value_cache, NULL,
                                        &workspace_bytes, &executor));
  run(opst_scatter_kv_cache, workspace_bytes, executor);

  /* The last query again, against the pages: the last row of the prompt's result. */
  const opst_tensor last_q = heads_of(query + (SEQ - 1) * HEADS * DIM, 1, HEADS), last_o = heads_of(last_out, 1, HEADS);
  inputs.query = &last_q;
  inputs.key = &key_cache;
  inputs.value = &value_cache;
  inputs.block_table = &block_table;
  inputs.kv_lengths = &kv_lengths;
  outputs.out = &last_o;
  check(opst_flash_attention_workspace(context, &inputs, &outputs, &options, &workspace_bytes, &executor));
  run(opst_flash_attention, workspace_bytes, executor);
  float difference = 0;
  for (int i = 0; i < HEADS * DIM; ++i) {
    const float d = last_out[i] - out[(SEQ - 1) * HEADS * DIM + i];
    if (d > difference) difference = d;
    if (-d > difference) difference = -d;
  }
  printf("a token from pages: %s\n", difference < 1e-5f ? "as in the prompt" : "DIFFERENT");

  /* What is wrong with a call is a sentence. */
  inputs.kv_lengths = NULL;
  const opst_status status =
      opst_flash_attention_workspace(context, &inputs, &outputs, &options, &workspace_bytes, &executor);
  printf("%s: %s\n", opst_status_name(status), opst_last_error());

  free(key_memory);
  free(value_memory);
  opst_context_destroy(context);
  return difference < 1e-5f && status == OPST_INVALID_ARGUMENT ? 0 : 1;
}
