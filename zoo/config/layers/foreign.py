"""What other trainers' settings are called here: names of transformers, TRL, PEFT, LLaMA-Factory, ms-swift, axolotl, Megatron-LM.

A name that is unknown here and known there gets zoo's key, and the arithmetic where the two count differently.
"""

from __future__ import annotations

from typing import NamedTuple

_BATCH = "train.global_batch counts the rows of an update over all ranks"
_ACCUMULATION = "gradient accumulation = train.global_batch / (train.micro_batch * data-parallel ranks)"
_ALWAYS = "on by themselves; there is nothing to set"


class Meaning(NamedTuple):
    """zoo's keys for a foreign name, and what to know about them; without keys, why there are none."""

    keys: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        if not self.keys:
            return self.note
        named = f"zoo's is {' and '.join(self.keys)}"
        return f"{named} ({self.note})" if self.note else named


# zoo's keys, a note, and the foreign names for them.
_TABLE: tuple[tuple[str, str, str], ...] = (
    ("model.init", "", "model_name_or_path model_name model_id model_path base_model pretrained_model_name_or_path load pretrained_checkpoint model model.path model.partial_pretrain partial_pretrain init_from_hf_path model_id_or_path checkpointer.checkpoint_dir hf_model_path"),
    ("model.family", "", "model_type architecture model_family"),
    ("data.template", "arguments of the chat template, which is the model's own: none has to be named", "template chat_template conversation_template chat_template_path"),
    ("model.freeze", "a list of parts, [vision] say", "freeze_vision_tower freeze_vit freeze_vision freeze_llm freeze_aligner freeze_multi_modal_projector freeze_mm_mlp_adapter tune_mm_vision tune_mm_llm tune_mm_mlp freeze_parameters freeze_trainable_layers trainable_parameters freeze_language_model freeze_text_model unfreeze_parameters freeze_projector"),
    ("data.train", "", "dataset datasets dataset_name dataset_dir train_file train_data train_dataset train_data_path data_path dataset_path dataset_text_field custom_train_dataset_path train_files data train_path train_dataset_path data_files"),
    ("data.eval", "", "eval_dataset val_dataset validation_file eval_file valid_data_path custom_val_dataset_path test_file eval_dataset_path test_datasets val_files val_path eval_data"),
    ("data.eval", "an entry of data.train and data.eval with held_out: 0.1 keeps a tenth of the rows", "val_size val_set_size split_dataset_ratio eval_split validation_split_percentage test_size"),
    ("data.root", "", "media_dir image_folder image_dir media_folder video_folder"),
    ("data.workers", "", "dataloader_num_workers num_workers preprocessing_num_workers dataset_num_proc"),
    ("data.shuffle", "", "dataset_shuffle train_dataloader_shuffle dataloader_shuffle"),
    ("data.video_fps", "", "fps"),
    ("data.max_frames", "", "video_maxlen fps_max_frames"),
    ("data.min_pixels", "", "image_min_pixels"),
    ("data.max_pixels", "", "image_max_pixels image_resolution max_image_size"),
    ("data.video_max_pixels", "", "video_resolution video_total_pixels"),
    ("data.labels", "", "train_on_inputs train_on_prompt mask_history completion_only_loss assistant_only_loss loss_scale"),
    ("train.steps", "", "max_steps num_steps total_steps train_iters iterations num_train_steps max_iters"),
    ("train.epochs", "", "num_train_epochs num_epochs max_epochs"),
    ("train.lr", "", "learning_rate max_lr base_lr optimizer.lr optim.lr"),
    ("train.min_lr", "a rate; of a ratio, train.lr * ratio", "min_learning_rate lr_end min_lr_rate min_lr_ratio cosine_min_lr_ratio"),
    ("train.lr_scale", "a factor for each part: train.lr_scale.vision = its rate / train.lr", "vit_lr vision_lr mm_projector_lr vision_tower_lr aligner_lr mm_vision_tower_lr embedding_learning_rate"),
    ("train.schedule", "cosine, constant, linear or wsd, each after a linear warm-up", "lr_scheduler_type lr_scheduler scheduler lr_decay_style"),
    ("train.schedule train.min_lr train.decay_steps", "", "lr_scheduler_kwargs lr_scheduler_args"),
    ("train.schedule train.steps", "cosine and linear end with the run", "lr_decay_iters lr_decay_steps"),
    ("train.schedule train.decay_steps", "wsd, whose decay is linear and ends with the run", "num_decay_steps wsd_decay_steps lr_wsd_decay_iters lr_wsd_decay_style num_stable_steps"),
    ("train.warmup_steps", "", "num_warmup_steps lr_warmup_steps lr_warmup_iters"),
    ("train.warmup_steps", "a number of steps: ratio * train.steps", "warmup_ratio lr_warmup_fraction"),
    ("train.weight_decay", "", "wd weight_decay_rate"),
    ("train.beta1", "", "adam_beta1"),
    ("train.beta2", "", "adam_beta2"),
    ("train.beta1 train.beta2", "", "betas adam_betas"),
    ("train.eps", "", "adam_epsilon adam_eps epsilon"),
    ("train.clip_grad", "", "max_grad_norm gradient_clipping grad_clip gradient_clip_val clip_grad_norm"),
    ("train.optimizer", "adamw or muon", "optim optimizer optim_args"),
    ("train.momentum", "Muon's; train.optimizer=muon", "muon_momentum use_muon"),
    ("train.global_batch", "", "global_batch_size total_batch_size train_batch_size effective_batch_size"),
    ("train.global_batch train.micro_batch", f"{_BATCH}, train.micro_batch those of one forward pass; a packed row counts as 1", "batch_size per_device_batch_size"),
    ("train.micro_batch", "under packing.mode=thd it stays 1 and packing.budget widens the row", "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size"),
    ("train.micro_batch", "evaluation packs its rows as training does", "per_device_eval_batch_size eval_batch_size eval_micro_batch_size"),
    ("train.global_batch", _ACCUMULATION, "gradient_accumulation_steps grad_accum accumulate_grad_batches gradient_accumulation accumulation_steps"),
    ("train.eval_every", "", "eval_steps eval_interval evaluation_steps val_check_interval test_freq"),
    ("train.eval_every", "in steps; 0 evaluates at the end alone", "eval_strategy evaluation_strategy do_eval evals_per_epoch"),
    ("train.eval_rows", "", "max_eval_samples eval_iters max_val_samples"),
    ("train.save_every", "", "save_steps save_interval checkpointing_steps save_freq"),
    ("train.save_every", "in steps; 0 saves at the end alone", "save_strategy saves_per_epoch"),
    ("train.keep", "", "save_total_limit max_to_keep"),
    ("train.early_stop train.early_stop_patience", "", "early_stopping early_stopping_patience early_stopping_steps early_stopping_threshold"),
    ("run.callbacks", "module:Class", "callbacks trainer_callbacks"),
    ("log.mlflow", "the experiment's name", "mlflow_experiment"),
    ("train.keep_best", "", "load_best_model_at_end metric_for_best_model save_best_model"),
    ("train.log_every", "", "logging_steps log_interval log_every_n_steps"),
    ("train.aux_loss", "", "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef"),
    ("train.z_loss", "", "moe_z_loss_coeff router_z_loss_coef"),
    ("train.mtp_loss", "", "mtp_loss_scaling_factor mtp_num_layers"),
    ("train.max_minutes", "in minutes", "max_time exit_duration_in_mins exit_interval time_limit"),
    ("lora.rank", "", "lora_rank lora_r peft_r lora_dim lora lora_config peft_config"),
    ("lora.rank", "a rank above 0 trains adapters, 0 the model's own weights", "finetuning_type train_type tuner_type use_lora use_peft peft_type adapter full_finetuning sft_type"),
    ("lora.alpha", "", "lora_alpha"),
    ("lora.rslora", "", "use_rslora lora_use_rslora rslora"),
    ("lora.dora", "", "use_dora lora_use_dora peft_use_dora dora"),
    ("lora.rank_pattern", "", "rank_pattern"),
    ("lora.alpha_pattern", "", "alpha_pattern"),
    ("lora.b_lr_scale", "LoRA+", "loraplus_lr_ratio lorap_lr_ratio lora_plus_lr_ratio"),
    ("lora.dropout", "", "lora_dropout"),
    ("lora.keep_dropout", "the other way round: false disables it, for losses of preferences", "disable_dropout"),
    ("lora.targets", "", "lora_target target_modules lora_target_modules lora_target_linear"),
    ("lora.parts", "", "target_regex lora_modules"),
    ("lora.whole_parts", "names of the model's parts, [merger] say", "modules_to_save additional_target"),
    ("lora.init", "", "adapter_name_or_path adapters lora_weights lora_model_dir"),
    ("packing.budget", "tokens of a packed row, and the most of one sample", "max_seq_length max_seq_len cutoff_len max_length model_max_length sequence_len seq_length seq_len max_position_embeddings block_size context_length"),
    ("packing.mode", "thd packs, none does not", "packing sample_packing neat_packing pad_to_sequence_len padding_free group_by_length use_packed_sequence"),
    ("packing.pad_to", "", "pad_to_multiple_of"),
    ("data.overlong", "", "truncation_strategy truncation truncation_side excess_length_strategy"),
    ("parallel.tp", "", "tensor_model_parallel_size tensor_parallel_size tp_size tensor_parallel"),
    ("parallel.pp", "", "pipeline_model_parallel_size pipeline_parallel_size pp_size"),
    ("parallel.vpp", "", "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank"),
    ("parallel.stage_layers", "layers of each stage, as [23, 24, 24, 23]", "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split"),
    ("parallel.cp", "", "context_parallel_size cp_size sequence_parallel_size ulysses_sequence_parallel_size sequence_parallel_degree"),
    ("parallel.ep", "", "expert_model_parallel_size expert_parallel_size ep_size moe_expert_model_parallel_size"),
    ("parallel.etp", "", "expert_tensor_parallel_size"),
    ("parallel.dispatch", "alltoall, deepep or hybridep", "moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep"),
    ("parallel.overlap_param_gather", "", "overlap_param_gather"),
    ("parallel.sp", "", "sequence_parallel"),
    ("nproc", "", "nproc_per_node num_processes num_gpus n_gpu gpus world_size devices n_gpus_per_node"),
    ("machine.nodes", "or hardware=2x8xh100", "nnodes num_nodes num_machines"),
    ("parallel.plan", "memory is shared out by megatron-core's distributed optimizer, and sizes by hardware=", "deepspeed fsdp fsdp_config ddp_find_unused_parameters zero_stage use_distributed_optimizer accelerator_config"),
    ("engine.precision", "fp32 or bf16; by itself bf16 on a GPU", "bf16 fp16 bf16_full_eval torch_dtype dtype mixed_precision tf32 pure_bf16 half_precision"),
    ("engine.fp8", "", "fp8_format"),
    ("engine.fp8_recipe", "blockwise or tensorwise", "fp8_recipe"),
    ("engine.backend", f"the fused kernels of attention are {_ALWAYS}", "attn_implementation flash_attn use_flash_attention use_flash_attention_2 attn_impl attention_backend transformer_impl use_flash_attn flash_attention flash_attention_2 xformers_attention sdp_attention sdpa_attention use_flash_attention_v2"),
    ("engine.recompute", "none, selective or full", "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing recompute_granularity recompute_method recompute_num_layers recompute_activations vit_gradient_checkpointing enable_activation_checkpointing enable_gradient_checkpointing use_gradient_checkpointing"),
    ("engine.threads", "", "omp_num_threads num_threads"),
    ("run.dir", "", "output_dir logging_dir save save_dir run_name checkpoint_dir out_dir output"),
    ("run.seed", "", "random_seed data_seed"),
    ("run.resume", "a run resumes from its run.dir by itself", "resume_from_checkpoint resume_from ckpt_path auto_resume auto_resume_from_checkpoints"),
    ("run.resume", "false refuses a folder that holds a checkpoint", "overwrite_output_dir"),
    ("run.hang_timeout", "in minutes", "ddp_timeout distributed_timeout_minutes nccl_timeout"),
    ("run.deterministic", "", "full_determinism use_deterministic_algorithms deterministic_mode"),
    ("log.tensorboard log.wandb log.mlflow log.trackio log.swanlab log.comet", "", "report_to tensorboard_dir log_with"),
    ("log.wandb", "the project's name", "wandb_project use_wandb wandb_name"),
    ("export", "", "save_hf_model save_safetensors export_dir"),
    ("export", "a folder; zoo convert RUN FOLDER push_to=ORG/NAME uploads it", "push_to_hub push_to_hub_model_id hub_model_id"),
    ("train.loss", "dpo, ipo, simpo, orpo or kto, of a recipe whose name ends in _dpo; nll else", "pref_loss loss_type"),
    ("train.beta", "of a loss of preferences", "pref_beta dpo_beta rl_beta kto_beta"),
    ("train.label_smoothing", "of dpo and simpo", "dpo_label_smoothing"),
    ("train.simpo_gamma", "", "simpo_gamma_beta"),
    ("data.train", "format: of an entry of data.train: data.train={path: FILE, format: NAME}; by default found by the rows' keys", "formatting dataset_format data_format format"),
    ("", "the recipe's file is named itself: zoo train FILE.yaml, or recipe=FILE.yaml", "config config_file config_path config_name config_dir yaml"),
    ("", "`zoo train` trains, and evaluates on data.eval", "do_train"),
    ("", "task=NAME beside the recipe's name chooses the task: sft, dpo, reward", "stage task rlhf_type"),
    ("", f"fused kernels are {_ALWAYS}", "use_liger_kernel enable_liger_kernel use_unsloth liger_kernel torch_compile"),
    ("", "columns are read by the rows' format, which is found by itself; an entry's format: names it", "remove_unused_columns dataset_kwargs"),
    ("", "a row's key system, or its first message", "system system_prompt default_system"),
    ("data.train", "split: of an entry of data.train or data.eval", "dataset_train_split dataset_test_split dataset_split"),
    ("", "the architecture is that of model.init or of size", "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention swiglu normalization norm_epsilon position_embedding_type rotary_base rotary_percent use_rotary_position_embeddings disable_bias_linear untie_embeddings_and_output_weights qk_layernorm kv_channels num_experts moe_router_topk moe_ffn_hidden_size make_vocab_size_divisible_by"),
    ("", "quantised weights are not trained here", "load_in_4bit load_in_8bit quantization_bit quantization_method quant_bits bnb_4bit_quant_type"),
)  # fmt: skip

NAMES = {name: Meaning(tuple(keys.split()), note) for keys, note, names in _TABLE for name in names.split()}

# zoo's key of an entry, or format of rows -> what others call it.
_ENTRY_KEYS = {
    "path": "file file_name filename file_path data_files data_file dataset local_path jsonl json annotation annotation_path train_file",
    "hub": "repo repo_id hf_hub_url ms_hub_url hf_id dataset_id dataset_name hub_id hf",
    "name": "subset config config_name dataset_config",
    "format": "type formatting data_type dataset_type style template",
    "root": "media_dir image_dir image_folder images_dir media image_root media_root data_root",
    "weight": "ratio sampling_ratio probability proportion prob",
    "epochs": "repeat repeats repeat_time",
    "held_out": "val_size eval_size test_size split_ratio val_set_size heldout holdout val_ratio",
    "columns": "mapping column_mapping field_mapping",
    "video_fps": "fps",
    "kinds": "modalities",
}  # fmt: skip
_FORMATS = {
    "conversations": "sharegpt llava vicuna fastchat", "messages": "openai chatml chat chat_template oai qwen swift",
    "alpaca": "instruction instruct", "preference": "dpo rm ranking pairs rlhf",
    "text": "pt pretrain pretraining completion plain txt", "captions": "caption", "transcripts": "asr transcript",
    "question_answer": "vqa qa",
}  # fmt: skip


def foreign_hint(key: str) -> str | None:
    """What zoo has for another trainer's name (`train.batch_size`, `--learning-rate`), or None for an unknown one."""
    name = foreign_name(key)
    return None if name is None else str(NAMES[name])


def foreign_name(key: str) -> str | None:
    """The name in NAMES that a key ends in; None where it ends in none of them."""
    parts = key.replace("-", "_").lower().split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((name for name in ends if name in NAMES), None)


def foreign_entry_key(name: str) -> str | None:
    """zoo's key of an entry of data.train for another trainer's, or None."""
    return next((key for key, names in _ENTRY_KEYS.items() if name.lower() in names.split()), None)


def foreign_format(name: str) -> str | None:
    """zoo's format of rows for another trainer's, or None."""
    plain = name.lower().replace("-", "_")
    return next((form for form, names in _FORMATS.items() if plain in names.split()), None)
