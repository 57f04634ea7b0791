/* opst as a C library: transformer operators in two phases, as accelerators' interfaces have them.
 *
 *   int64_t bytes;
 *   opst_executor* executor;
 *   opst_rms_norm_workspace(context, &x, &weight, 1e-5, &out, NULL, &bytes, &executor);     phase 1: check and plan
 *   void* workspace = bytes > 0 ? aligned_alloc(OPST_WORKSPACE_ALIGNMENT, bytes) : NULL;
 *   opst_rms_norm(workspace, bytes, executor);                                              phase 2: run
 *   opst_executor_destroy(executor);
 *
 * Phase 1 checks every argument, writes nothing but *workspace_bytes and *executor, and allocates the executor. Where it
 * refuses the call, *workspace_bytes is 0 and *executor NULL. The executor keeps the tensors (addresses, sizes,
 * strides) and the options; weights that it needs live at least as long as it does.
 * Phase 2 runs the call in the caller's memory. Where it succeeds it has allocated nothing (but the stacks of threads that
 * a forked child starts anew). It checks again what may have
 * changed: the integers in lengths, tables, slots and group lists are read anew, and where the same workspace no longer
 * holds the call (longer lists than in phase 1) it is refused. The contents of all other tensors are free to change.
 *
 * An executor runs once; after opst_executor_set_repeatable as often as wanted, one run at a time, each time on the
 * tensors' present contents. (A run that is refused does not count.)
 *
 * Errors: every function that can fail returns an opst_status, and leaves a sentence in opst_last_error() of its thread.
 * A function never prints, exits or lets a C++ exception out. NULL, sizes that are negative or overflow, and numbers
 * that are no enumerator are refused; memory that is not there, or handles that are destroyed, cannot be told from good
 * ones.
 *
 * Threads: any number of them may use one context at once, each with executors of its own. A weight may be used by all.
 * A workspace belongs to one run at a time. Calls have the same bits for any number of threads.
 *
 * The equations, shapes and dtypes of each operator are in the headers of the C++ interface, which are named beside
 * them; an argument has the same meaning under the same name. docs/c_api.md: what corresponds to what for callers of
 * aclnn functions. */
#pragma once

#include "opst/opst_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The library's version, "0.1.0". */
const char* opst_version(void);
/* What was wrong with the last call of this thread that failed: "opst_matmul_workspace: x is NULL". "" before any. The
 * text stays until the thread's next failure. */
const char* opst_last_error(void);
/* "invalid_argument"; "unknown" for a number that is no status. */
const char* opst_status_name(opst_status status);

/* ---- contexts (context.h) ---------------------------------------------------------------------------------------- */

/* Threads are started here. options: NULL for the defaults. */
opst_status opst_context_create(const opst_context_options* options, opst_context** context);
/* Executors of the context stay usable. NULL is ignored. */
void opst_context_destroy(opst_context* context);

/* ---- tensors (tensor.h) ------------------------------------------------------------------------------------------ */

/* Fills *tensor with a row-major view of `data`. */
opst_status opst_tensor_contiguous(opst_dtype dtype, int32_t rank, const int64_t* shape, void* data,
                                   opst_tensor* tensor);
/* Exchanges two dimensions of a view. */
opst_status opst_tensor_transpose(opst_tensor* tensor, int32_t a, int32_t b);

/* ---- executors --------------------------------------------------------------------------------------------------- */

opst_status opst_executor_set_repeatable(opst_executor* executor);
/* Not while it runs. NULL is ignored. */
void opst_executor_destroy(opst_executor* executor);

/* ---- attention (attention.h, attention_backward.h) --------------------------------------------------------------- */

/* With a block_table among the inputs: paged attention. */
opst_status opst_flash_attention_workspace(opst_context* context, const opst_attention_inputs* inputs,
                                           const opst_attention_outputs* outputs, const opst_attention_options* options,
                                           int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_flash_attention(void* workspace, int64_t workspace_bytes, opst_executor* executor);

opst_status opst_flash_attention_backward_workspace(opst_context* context, const opst_attention_inputs* inputs,
                                                    const opst_attention_saved* saved,
                                                    const opst_attention_gradients* gradients,
                                                    const opst_attention_options* options, int64_t* workspace_bytes,
                                                    opst_executor** executor);
opst_status opst_flash_attention_backward(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* ---- products (matmul.h, grouped_matmul.h) ----------------------------------------------------------------------- */

/* Packs a weight [n, k] of f32, bf16 or f16; [count, n, k] is a stack, for grouped products. Allocates; the source may
 * be gone afterwards. */
opst_status opst_weight_pack(opst_context* context, const opst_tensor* weight, opst_weight** packed);
/* A matrix in a block format. count > 1: a stack of matrices of one format and size. */
opst_status opst_weight_pack_blocks(opst_context* context, const opst_quant_matrix* matrices, int64_t count,
                                    opst_weight** packed);
/* The same of an int8 or int4 weight with scales. */
opst_status opst_weight_pack_int(opst_context* context, const opst_int_matrix* matrices, int64_t count,
                                 opst_weight** packed);
/* Executors that multiply with the weight stay usable. NULL is ignored. */
void opst_weight_destroy(opst_weight* weight);

/* out [m, n] = residual + activation(x [m, k] . weight [n, k]^T + bias) */
opst_status opst_matmul_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight,
                                  const opst_tensor* out, const opst_matmul_options* options, int64_t* workspace_bytes,
                                  opst_executor** executor);
opst_status opst_matmul(void* workspace, int64_t workspace_bytes, opst_executor* executor);

opst_status opst_matmul_packed_workspace(opst_context* context, const opst_tensor* x, const opst_weight* weight,
                                         const opst_tensor* out, const opst_matmul_options* options,
                                         int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_matmul_packed(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* Rows of group e times weight e. weight [groups, n, k]; group_list i32 or i64 [groups]. */
opst_status opst_grouped_matmul_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight,
                                          const opst_tensor* group_list, opst_group_list_type type,
                                          const opst_tensor* out, const opst_matmul_options* options,
                                          int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_grouped_matmul(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* The same with a stack that is packed. */
opst_status opst_grouped_matmul_packed_workspace(opst_context* context, const opst_tensor* x, const opst_weight* weight,
                                                 const opst_tensor* group_list, opst_group_list_type type,
                                                 const opst_tensor* out, const opst_matmul_options* options,
                                                 int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_grouped_matmul_packed(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* ---- pages of keys and values (kv_cache.h) ----------------------------------------------------------------------- */

/* The bytes of a cache of these sizes. */
opst_status opst_kv_pages_size(const opst_page_sizes* sizes, int64_t* key_bytes, int64_t* value_bytes);
/* Fills *key and *value with views of the caller's memory in the shapes of the layout. The memory is not touched. */
opst_status opst_kv_pages(const opst_page_sizes* sizes, void* key_memory, int64_t key_bytes, void* value_memory,
                          int64_t value_bytes, opst_tensor* key, opst_tensor* value);

/* Writes the keys and values [tokens, num_kv_heads, dim] of new tokens into the slots that slot_mapping names. */
opst_status opst_scatter_kv_cache_workspace(opst_context* context, const opst_tensor* key, const opst_tensor* value,
                                            const opst_tensor* slot_mapping, const opst_tensor* key_cache,
                                            const opst_tensor* value_cache, const opst_scatter_options* options,
                                            int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_scatter_kv_cache(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* Reads cached tokens, sequence after sequence, into key and value [tokens, heads, dim]. */
opst_status opst_gather_kv_cache_workspace(opst_context* context, const opst_tensor* key_cache,
                                           const opst_tensor* value_cache, const opst_tensor* block_table,
                                           const opst_tensor* kv_lengths, const opst_tensor* key,
                                           const opst_tensor* value, const opst_gather_options* options,
                                           int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_gather_kv_cache(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* ---- norms (rowwise.h) ------------------------------------------------------------------------------------------- */

/* x, out [.., features]; weight [features]; rstd f32 [..], written, or NULL. */
opst_status opst_rms_norm_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight, double eps,
                                    const opst_tensor* out, const opst_tensor* rstd, int64_t* workspace_bytes,
                                    opst_executor** executor);
opst_status opst_rms_norm(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* sum = a + b, out = rms_norm(sum) */
opst_status opst_add_rms_norm_workspace(opst_context* context, const opst_tensor* a, const opst_tensor* b,
                                        const opst_tensor* weight, double eps, const opst_tensor* out,
                                        const opst_tensor* sum, const opst_tensor* rstd, int64_t* workspace_bytes,
                                        opst_executor** executor);
opst_status opst_add_rms_norm(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* grad_x as x, grad_weight [features]: NULL is not computed. */
opst_status opst_rms_norm_backward_workspace(opst_context* context, const opst_tensor* grad_out, const opst_tensor* x,
                                             const opst_tensor* weight, double eps, const opst_tensor* grad_x,
                                             const opst_tensor* grad_weight, int64_t* workspace_bytes,
                                             opst_executor** executor);
opst_status opst_rms_norm_backward(void* workspace, int64_t workspace_bytes, opst_executor* executor);

/* weight and bias [features], mean and rstd f32 [..]: NULL is absent. */
opst_status opst_layer_norm_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight,
                                      const opst_tensor* bias, double eps, const opst_tensor* out,
                                      const opst_tensor* mean, const opst_tensor* rstd, int64_t* workspace_bytes,
                                      opst_executor** executor);
opst_status opst_layer_norm(void* workspace, int64_t workspace_bytes, opst_executor* executor);

opst_status opst_layer_norm_backward_workspace(opst_context* context, const opst_tensor* grad_out, const opst_tensor* x,
                                               const opst_tensor* weight, double eps, const opst_tensor* grad_x,
                                               const opst_tensor* grad_weight, const opst_tensor* grad_bias,
                                               int64_t* workspace_bytes, opst_executor** executor);
opst_status opst_layer_norm_backward(void* workspace, int64_t workspace_bytes, opst_executor* executor);

#ifdef __cplusplus
} /* extern "C" */
#endif
