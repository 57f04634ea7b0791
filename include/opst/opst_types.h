/* The C interface's types: status codes, tensors, enumerations, options. The functions are in opst.h.
 *
 * Plain C11; C++ may include it too. The numbers, and the members of the structs, stay as they are for all libraries
 * whose symbols have the version OPST_1; a later library may know further numbers. */
#pragma once

#include <stdint.h>

#define OPST_MAX_RANK 5
/* Workspaces begin at a multiple of this many bytes: aligned_alloc(OPST_WORKSPACE_ALIGNMENT, workspace_bytes). */
#define OPST_WORKSPACE_ALIGNMENT 64
/* A side of a window that hides nothing. */
#define OPST_UNBOUNDED INT64_MAX
/* opst_attention_options.shared_prefix: the plan finds what sequences share. */
#define OPST_FIND_SHARED (-1)

/* What a function returns. Other than OPST_OK: opst_last_error() names function, argument, what it got and what it
 * expected, and no output has been written. */
typedef int32_t opst_status;
enum {
  OPST_OK = 0,
  OPST_INVALID_ARGUMENT = 1, /* contradicts itself, another argument or the documented limits */
  OPST_UNSUPPORTED = 2,      /* well formed, but this build or machine has no implementation of it */
  OPST_OUT_OF_MEMORY = 3,
  OPST_COMMUNICATION = 4,
  OPST_TIMEOUT = 5,
  OPST_INTERNAL = 6 /* a bug of the library */
};

typedef int32_t opst_dtype;
enum {
  OPST_F32 = 0,
  OPST_F64 = 1,
  OPST_BF16 = 2,
  OPST_F16 = 3,
  OPST_I8 = 4,
  OPST_U8 = 5,
  OPST_I32 = 6,
  OPST_I64 = 7,
  OPST_BOOL = 8,
  OPST_F8_E4M3 = 9,
  OPST_F8_E5M2 = 10
};

/* A view of the caller's memory. Layout is strides: [batch, seq, heads, dim] memory is the view
 * {batch, heads, seq, dim} with the strides exchanged, and no function knows a layout by name. Strides count elements.
 * A pointer to a tensor that is NULL is an absent tensor, where the argument is optional. */
typedef struct opst_tensor {
  opst_dtype dtype;
  int32_t rank; /* 0 to OPST_MAX_RANK */
  int64_t shape[OPST_MAX_RANK];
  int64_t strides[OPST_MAX_RANK];
  void* data; /* at a multiple of an element's size; of inputs it is only read */
} opst_tensor;

/* Created by opst.h's functions, never looked into. */
typedef struct opst_context opst_context;   /* processor, threads */
typedef struct opst_executor opst_executor; /* one checked and planned call */
typedef struct opst_weight opst_weight;     /* packed for products */

/* Every struct of options below begins with its own size, so that later libraries can tell the members that a caller
 * knows, and has a macro with all defaults:
 *
 *   opst_attention_options options = OPST_ATTENTION_OPTIONS;
 *   options.causal = 1;
 *
 * A NULL pointer to options means the defaults. Flags are 0 or 1. */

typedef struct opst_context_options {
  int64_t struct_bytes;
  int32_t num_threads; /* the caller's included; 0: OPST_NUM_THREADS of the environment, else all cores */
  const char* isa;     /* "generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"; NULL: the processor's */
} opst_context_options;
#define OPST_CONTEXT_OPTIONS \
  { sizeof(opst_context_options), 0, 0 }

/* Where the diagonal of causal masks and windows lies: query i sees keys j <= i (top left), or
 * j <= i + kv_len - query_len (bottom right). */
typedef int32_t opst_alignment;
enum { OPST_TOP_LEFT = 0, OPST_BOTTOM_RIGHT = 1 };

typedef int32_t opst_attention_path;
enum { OPST_PATH_AUTOMATIC = 0, OPST_PATH_STANDARD = 1, OPST_PATH_FLASH = 2 };

typedef int32_t opst_alibi_form;
enum { OPST_ALIBI_LINEAR = 0, OPST_ALIBI_SQUARE_ROOT = 1 };

/* page_layout.h of the C++ interface has the shapes. */
typedef int32_t opst_page_layout;
enum { OPST_PAGES_NORM = 0, OPST_PAGES_PANEL32 = 1 };

typedef struct opst_attention_inputs {
  int64_t struct_bytes;
  const opst_tensor*
      query;              /* [batch, num_heads, query_len, head_dim]; with cu_seqlens_q [total, num_heads, head_dim] */
  const opst_tensor* key; /* [batch, num_kv_heads, kv_len, head_dim]; with a block_table pages */
  const opst_tensor* value;
  /* All others are optional: NULL is absent. */
  const opst_tensor* block_table;   /* i32 or i64 [batch, max_blocks] */
  const opst_tensor* kv_lengths;    /* i32 or i64 [batch]; required with a block_table */
  const opst_tensor* key_scales;    /* f32, of pages of i8 and u8 */
  const opst_tensor* value_scales;  /* likewise */
  const opst_tensor* key_offsets;   /* likewise; a number is (q + offset) * scale */
  const opst_tensor* value_offsets; /* likewise */
  const opst_tensor* cu_seqlens_q;  /* i32 or i64 [batch + 1], the first 0 */
  const opst_tensor* cu_seqlens_k;
  const opst_tensor* prefix;       /* i32 or i64 [batch]: keys that every query sees */
  const opst_tensor* mask;         /* bool, not 0 = visible */
  const opst_tensor* bias;         /* f32 or query's dtype, added to the scaled score */
  const opst_tensor* alibi_slopes; /* f32 [num_heads] or [batch, num_heads] */
  const opst_tensor* sinks;        /* f32 [num_heads] */
  const opst_tensor* drop_mask;    /* u8, bits, 1 = keep */
  const opst_tensor* block_mask_row_offsets;
  const opst_tensor* block_mask_columns;
  int64_t block_mask_q; /* queries and keys of a block of the block mask */
  int64_t block_mask_kv;
  const opst_tensor* sparse_indices; /* i32 [batch, query_len, num_kv_heads, count] */
  int64_t sparse_block_size;
  const opst_tensor* tree_mask;  /* i64 [batch, query_len] */
  const opst_tensor* query_rope; /* further columns of query and key, both or neither */
  const opst_tensor* key_rope;
} opst_attention_inputs;
#define OPST_ATTENTION_INPUTS \
  { sizeof(opst_attention_inputs), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0 }

typedef struct opst_attention_outputs {
  int64_t struct_bytes;
  const opst_tensor* out;         /* [batch, num_heads, query_len, value_head_dim] */
  const opst_tensor* softmax_lse; /* f32 (f64 of f64) [batch, num_heads, query_len]; these three are optional */
  const opst_tensor* softmax_max;
  const opst_tensor* softmax_sum;
} opst_attention_outputs;
#define OPST_ATTENTION_OUTPUTS \
  { sizeof(opst_attention_outputs), 0, 0, 0, 0 }

typedef struct opst_attention_options {
  int64_t struct_bytes;
  double softmax_scale;      /* any finite number, as it is where has_softmax_scale */
  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim) */
  int32_t causal;
  opst_alignment alignment;
  opst_attention_path path;
  int64_t block_q; /* tile sizes; 0: the plan's choice */
  int64_t block_kv;
  int64_t window_left; /* keys that a query sees to its left and right, OPST_UNBOUNDED: all */
  int64_t window_right;
  double softcap;    /* > 0: scores are bounded by +-softcap */
  double bias_scale; /* of the bias */
  opst_alibi_form alibi_form;
  opst_page_layout page_layout; /* of key and value, with a block_table */
  int64_t alibi_query_start;
  int64_t alibi_key_start;
  int64_t shared_prefix;
  double keep_prob; /* of dropout */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  int64_t dropout_first_query; /* where a piece of a larger problem begins */
  int64_t dropout_first_key;
  int64_t dropout_first_head;
  int64_t dropout_total_heads;
} opst_attention_options;
#define OPST_ATTENTION_OPTIONS                                                                                \
  {                                                                                                           \
    sizeof(opst_attention_options), 0, 0, 0, OPST_BOTTOM_RIGHT, OPST_PATH_AUTOMATIC, 0, 0, OPST_UNBOUNDED,    \
        OPST_UNBOUNDED, 0, 1, OPST_ALIBI_LINEAR, OPST_PAGES_NORM, 0, 0, OPST_FIND_SHARED, 1, 0, 0, 0, 0, 0, 0 \
  }

/* What forward wrote, and the gradient of its output. softmax_lse, or softmax_max and softmax_sum. */
typedef struct opst_attention_saved {
  int64_t struct_bytes;
  const opst_tensor* out;
  const opst_tensor* softmax_lse;
  const opst_tensor* softmax_max;
  const opst_tensor* softmax_sum;
  const opst_tensor* grad_out;
  const opst_tensor* grad_lse; /* optional */
} opst_attention_saved;
#define OPST_ATTENTION_SAVED \
  { sizeof(opst_attention_saved), 0, 0, 0, 0, 0, 0 }

/* NULL: not computed. */
typedef struct opst_attention_gradients {
  int64_t struct_bytes;
  const opst_tensor* grad_query;
  const opst_tensor* grad_key;
  const opst_tensor* grad_value;
  const opst_tensor* grad_bias;
  const opst_tensor* grad_sinks;
  const opst_tensor* grad_query_rope;
  const opst_tensor* grad_key_rope;
} opst_attention_gradients;
#define OPST_ATTENTION_GRADIENTS \
  { sizeof(opst_attention_gradients), 0, 0, 0, 0, 0, 0, 0 }

typedef int32_t opst_activation;
enum {
  OPST_ACTIVATION_NONE = 0,
  OPST_SILU = 1,
  OPST_GELU_ERF = 2,
  OPST_GELU_TANH = 3,
  OPST_SWIGLU = 4,        /* silu(y[:, :n/2]) * y[:, n/2:] */
  OPST_SWIGLU_SWAPPED = 5 /* y[:, :n/2] * silu(y[:, n/2:]) */
};

/* How x meets a weight in blocks: as it is, or each row rounded to int8 in blocks of 32. */
typedef int32_t opst_activation_type;
enum { OPST_ACTIVATIONS_EXACT = 0, OPST_ACTIVATIONS_INT8 = 1 };

/* GGUF's block formats; quant_format.h of the C++ interface has their bytes. */
typedef int32_t opst_quant_format;
enum {
  OPST_FORMAT_F32 = 0,
  OPST_FORMAT_F16 = 1,
  OPST_FORMAT_Q8_0 = 2,
  OPST_FORMAT_Q4_1 = 3,
  OPST_FORMAT_Q4_0 = 4,
  OPST_FORMAT_Q5_0 = 5,
  OPST_FORMAT_Q5_1 = 6,
  OPST_FORMAT_Q6_K = 7,
  OPST_FORMAT_Q4_K = 8,
  OPST_FORMAT_Q5_K = 9,
  OPST_FORMAT_BF16 = 10
};

/* A matrix [rows, cols] of blocks. */
typedef struct opst_quant_matrix {
  opst_quant_format format;
  int64_t rows;
  int64_t cols;
  const void* data;
  int64_t size_bytes;
} opst_quant_matrix;

/* value[r, c] = (q[r, c] - zero[r, g]) * scale[r, g], g = c / (cols / groups) */
typedef struct opst_int_matrix {
  const opst_tensor* q;      /* i8 [rows, cols]; or int4: u8 [rows, cols / 2], the lower half of a byte first */
  const opst_tensor* scales; /* f32 [rows, groups] */
  const opst_tensor* zeros;  /* i8 [rows, groups]; NULL: 0 */
} opst_int_matrix;

typedef int32_t opst_group_list_type;
enum {
  OPST_GROUP_ENDS = 0,  /* the first row behind each group: cumulative, without a leading 0 */
  OPST_GROUP_COUNTS = 1 /* rows of each group */
};

/* out = residual + activation(x . weight^T + bias). All tensors are optional. */
typedef struct opst_matmul_options {
  int64_t struct_bytes;
  const opst_tensor* bias; /* [n]; of a grouped product [groups, n] */
  opst_activation activation;
  opst_activation_type activations;
  const opst_tensor* residual;      /* out's shape; may be the same view as out */
  const opst_tensor* x_scales;      /* f32 [m]: x is i8; with int8 or int4 weights */
  const opst_tensor* out_scales;    /* written, f32 [m]: out is i8, each row quantised by its own scale */
  const opst_tensor* smooth_scales; /* grouped, with out_scales: f32 [groups, width of out] or [groups] */
  int32_t batch_invariant;          /* the same bits for any number of rows */
} opst_matmul_options;
#define OPST_MATMUL_OPTIONS \
  { sizeof(opst_matmul_options), 0, OPST_ACTIVATION_NONE, OPST_ACTIVATIONS_EXACT, 0, 0, 0, 0, 0 }

typedef struct opst_page_sizes {
  opst_page_layout layout;
  opst_dtype dtype;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_head_dim;
} opst_page_sizes;

/* f32 pages of scales, and offsets, beside a cache of integers; NULL: none. */
typedef struct opst_page_scales {
  const opst_tensor* key;
  const opst_tensor* value;
  const opst_tensor* key_offsets;
  const opst_tensor* value_offsets;
} opst_page_scales;

typedef struct opst_scatter_options {
  int64_t struct_bytes;
  opst_page_layout layout;
  int32_t scales_given; /* scales are read, not computed and written */
  opst_page_scales scales;
} opst_scatter_options;
#define OPST_SCATTER_OPTIONS                                         \
  {                                                                  \
    sizeof(opst_scatter_options), OPST_PAGES_NORM, 0, { 0, 0, 0, 0 } \
  }

typedef struct opst_gather_options {
  int64_t struct_bytes;
  opst_page_layout layout;
  int32_t cumulative_lengths; /* kv_lengths is [batch + 1], the first 0 */
  opst_page_scales scales;
  const opst_tensor* seq_offset;   /* i32 or i64 [batch]: first token of each sequence; NULL: 0 */
  const opst_tensor* head_indices; /* i32 or i64 [heads]; NULL: all */
  int32_t zero_fill;               /* rows past the table or of no block become zero instead of an error */
} opst_gather_options;
#define OPST_GATHER_OPTIONS \
  { sizeof(opst_gather_options), OPST_PAGES_NORM, 0, {0, 0, 0, 0}, 0, 0, 0 }
