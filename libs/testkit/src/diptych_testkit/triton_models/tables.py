"""The tensors of TensorRT-LLM's two models, as its configurations declare them."""

from collections.abc import Iterator, Mapping

INFLIGHT_INPUTS = """
input_ids INT32 -1
input_lengths INT32 1 required
request_output_len INT32 1 required
num_return_sequences INT32 1
draft_input_ids INT32 -1
end_id INT32 1
pad_id INT32 1
stop_words_list INT32 2,-1
bad_words_list INT32 2,-1
embedding_bias FP32 -1
beam_width INT32 1
temperature FP32 1
runtime_top_k INT32 1
runtime_top_p FP32 1
runtime_top_p_min FP32 1
runtime_top_p_decay FP32 1
runtime_top_p_reset_ids INT32 1
len_penalty FP32 1
early_stopping BOOL 1
repetition_penalty FP32 1
min_tokens INT32 1
presence_penalty FP32 1
frequency_penalty FP32 1
seed UINT64 1
return_log_probs BOOL 1
return_context_logits BOOL 1
return_generation_logits BOOL 1
return_perf_metrics BOOL 1
return_num_input_tokens BOOL 1
return_num_output_tokens BOOL 1
exclude_input_in_output BOOL 1
stop BOOL 1
streaming BOOL 1
prompt_table_extra_ids UINT64 -1
lora_task_id UINT64 1
lora_weights FP16 -1,-1
lora_config INT32 -1,3
context_phase_params UINT8 -1
retention_token_range_starts INT32 -1
retention_token_range_ends INT32 -1
retention_token_range_priorities INT32 -1
retention_token_range_durations_ms INT32 -1
retention_decode_priority INT32 1
retention_decode_duration_ms INT32 1
guided_decoding_guide_type STRING 1
guided_decoding_guide STRING 1
lookahead_window_size INT32 1
lookahead_ngram_size INT32 1
lookahead_verification_set_size INT32 1
"""
INFLIGHT_OUTPUTS = """
output_ids INT32 -1,-1
sequence_length INT32 -1
cum_log_probs FP32 -1
output_log_probs FP32 -1,-1
context_logits FP32 -1,-1
generation_logits FP32 -1,-1,-1
batch_index INT32 1
sequence_index INT32 1
context_phase_params UINT8 -1
kv_cache_alloc_new_blocks INT32 1
kv_cache_reused_blocks INT32 1
kv_cache_alloc_total_blocks INT32 1
arrival_time_ns INT64 1
first_scheduled_time_ns INT64 1
first_token_time_ns INT64 1
last_token_time_ns INT64 1
acceptance_rate FP32 1
total_accepted_draft_tokens INT32 1
total_draft_tokens INT32 1
num_input_tokens INT32 1
num_output_tokens INT32 1
"""
LLM_API_INPUTS = """
text_input STRING -1 required
streaming BOOL 1
sampling_param_best_of INT32 1
sampling_param_temperature FP32 1
sampling_param_top_k INT32 1
sampling_param_top_p FP32 1
sampling_param_frequency_penalty FP32 1
sampling_param_presence_penalty FP32 1
sampling_param_max_tokens INT32 1
sampling_param_stop STRING -1
sampling_param_seed UINT64 1
sampling_param_exclude_input_from_output BOOL 1
sampling_param_return_perf_metrics BOOL 1
return_finish_reason BOOL 1
return_stop_reason BOOL 1
return_cumulative_logprob BOOL 1
stop BOOL 1
lora_id UINT64 1
lora_name STRING 1
lora_path STRING 1
lora_ckpt_source STRING 1
"""
LLM_API_OUTPUTS = """
text_output STRING -1
finish_reason STRING -1
stop_reason STRING -1
cumulative_logprob FP32 -1
kv_cache_reused_block INT32 -1
kv_cache_alloc_new_blocks INT32 -1
arrival_time_ns INT64 1
"""


def config(
    name: str, *, inputs: str, outputs: str, parameters: Mapping[str, str], more: str = ""
) -> str:
    """A `config.pbtxt` of the Python backend."""
    lines = [f'name: "{name}"', 'backend: "python"', more]
    lines += _tensors("input", inputs, optional=True)
    lines += _tensors("output", outputs, optional=False)
    lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    return "\n".join(lines) + "\n"


def _tensors(side: str, table: str, *, optional: bool) -> Iterator[str]:
    for line in table.split("\n"):
        if not line:
            continue
        name, kind, dims, *required = line.split()
        may_lack = " optional: true" if optional and not required else ""
        yield f'{side} {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ]{may_lack} }}'
