"""The part of llama.cpp's C interface used here, as it stands in one pinned build.

The interface is not stable: a field inserted into a struct moves every field behind it, silently.
So the build is pinned, and `library` compares the defaults it reads through these structs with the
ones that build is known to have. Enumerations are declared as `int32_t`, and pointers that stay
null as `void *`: same size, fewer names.
"""

BUILD = "b11549"
"""The llama.cpp build these declarations describe: PyPI `xllamacpp` 2026.10.11549."""

DECLARATIONS = """
struct llama_model_params {
    void *devices;
    const void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int32_t split_mode;
    int32_t load_mode;
    int32_t lazy_mode;
    int32_t main_gpu;
    const float *tensor_split;
    void *progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
};

struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t ctx_type;
    int32_t rope_scaling_type;
    int32_t pooling_type;
    int32_t attention_type;
    int32_t flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval;
    void *cb_eval_user_data;
    int32_t type_k;
    int32_t type_v;
    size_t moe_cache_size;
    void *abort_callback;
    void *abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void *samplers;
    size_t n_samplers;
    void *ctx_other;
};

struct llama_batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};

void llama_log_set(void (*callback)(int32_t level, const char *text, void *data), void *data);
void llama_backend_init(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);

void *llama_model_load_from_file(const char *path, struct llama_model_params params);
void llama_model_free(void *model);
const void *llama_model_get_vocab(const void *model);
int32_t llama_vocab_n_tokens(const void *vocab);
bool llama_model_has_encoder(const void *model);
bool llama_model_is_recurrent(const void *model);
int32_t llama_model_n_swa(const void *model);
bool llama_model_is_hybrid(const void *model);
int32_t llama_model_n_embd_out(const void *model);
int32_t llama_model_meta_val_str(const void *model, const char *key, char *text, size_t size);

void *llama_init_from_model(void *model, struct llama_context_params params);
void llama_free(void *context);
void llama_set_n_threads(void *context, int32_t n_threads, int32_t n_threads_batch);

int32_t llama_decode(void *context, struct llama_batch batch);
float *llama_get_logits_ith(void *context, int32_t i);
float *llama_get_embeddings_ith(void *context, int32_t i);
struct llama_batch llama_batch_get_one(int32_t *tokens, int32_t n_tokens);

void *llama_get_memory(const void *context);
void llama_memory_clear(void *memory, bool data);
bool llama_memory_seq_rm(void *memory, int32_t seq, int32_t p0, int32_t p1);
void llama_memory_seq_cp(void *memory, int32_t from_seq, int32_t to_seq, int32_t p0, int32_t p1);
int32_t llama_memory_seq_pos_min(void *memory, int32_t seq);
int32_t llama_memory_seq_pos_max(void *memory, int32_t seq);

size_t llama_state_seq_get_size_ext(void *context, int32_t seq, uint32_t flags);
size_t llama_state_seq_get_data_ext(
    void *context, uint8_t *out, size_t size, int32_t seq, uint32_t flags);
size_t llama_state_seq_set_data_ext(
    void *context, const uint8_t *data, size_t size, int32_t seq, uint32_t flags);
"""

KNOWN_CONTEXT_DEFAULTS: dict[str, float] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "pooling_type": -1,
    "flash_attn_type": -1,
    "yarn_beta_fast": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "moe_cache_size": 0,
    "embeddings": 0,
    "offload_kqv": 1,
    "no_perf": 1,
    "op_offload": 1,
    "swa_full": 1,
    "kv_unified": 0,
    "n_samplers": 0,
}
"""What `llama_context_default_params` of this build says, from the first field to the last."""

KNOWN_MODEL_DEFAULTS: dict[str, float] = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "vocab_only": 0,
    "use_extra_bufts": 1,
    "load_mtp": 0,
}
"""What `llama_model_default_params` of this build says."""

TYPE_F16 = 1
FLASH_ATTENTION_ON = 1
POOLING_NONE = 0
LOG_WARN = 3
LOG_ERROR = 4
