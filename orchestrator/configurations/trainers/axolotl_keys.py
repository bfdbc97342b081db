"""Class of each key of axolotl, by its schemas of 0.19 (``axolotl/utils/schemas``)."""

from orchestrator.configurations.key_classes import (
    IMAGES,
    Key,
    assumed,
    irrelevant,
    refused,
    shared,
    table_of,
    used,
)

SEVERAL_GPUS = (
    "trains on several GPUs in a way that is not simulated: use FSDP2 or DDP, or remove it"
)
LEARNING = irrelevant("learning, not speed")
LOGGING = irrelevant("logging")
SAVING = irrelevant("saving; checkpoints are priced by --checkpoint-seconds and -minutes")
TOKENS = irrelevant("text of examples; their lengths come from --dataset or --length-histogram")
LOADING = irrelevant("loading and preparation of data or weights")
GENERATING = irrelevant("inference, not training")
REPLACED = "PEFT's and transformers' own layers, which need more memory and time"
EXPERT_KERNELS = "transformers' grouped product of experts, which copies tokens and takes longer"
ALL_LOGITS = "transformers' loss from all logits at once, which needs more memory"
PADDED = "padded batches, which need more memory and time"
ONE_MICRO_BATCH = "the micro-batch of the file, also where it does not fit"
KEPT_CACHE = "the allocator keeps its cache, which takes more memory and less time"
UNREAD = irrelevant("read only with a plugin that is refused, or that does not train")
SAME = "the same model with all weights"
NO_EVALUATION = "no evaluation: its time, and memory beyond training's, come on top"
SET_ASIDE = (
    "the examples set aside are not trained on, and their evaluation is left out: its time, and "
    "memory beyond training's, come on top"
)
STOPS_EARLY = assumed("trains to the end")
RESUMES = assumed("trains from the start")
ANOTHER_ADAPTER = assumed("the rank and layers of this file; the adapters there may have others")
LONG_EXAMPLES = {"drop": "dropped", "truncate": "cut", "raise": "cut"}
NOT_SIMULATED = "not simulated: remove it, or measure the step"

KEYS: dict[str, Key] = {
    "base_model": used("model"),
    "base_model_config": shared("model"),
    "sequence_len": shared("seq_len, cutoff"),
    "micro_batch_size": shared("batch_size, effective_batch"),
    "gradient_accumulation_steps": shared("effective_batch"),
    "batch_size": shared("effective_batch"),
    "num_epochs": shared("epochs"),
    "max_steps": shared("examples, epochs"),
    "adapter": shared("method"),
    "load_in_4bit": shared("method, quantisation"),
    "load_in_8bit": shared("method, quantisation"),
    "quantize_moe_experts": shared("experts, quantised_experts"),
    "experts_implementation": shared("experts"),
    "expert_backend": shared("experts"),
    "gptq": shared("method, quantisation"),
    "bnb_config_kwargs": shared("quantisation, double_quantisation"),
    "lora_r": shared("lora_rank"),
    "lora_alpha": shared("lora_alpha"),
    "lora_dropout": shared("lora_dropout"),
    "lora_target_linear": shared("lora_targets"),
    "lora_target_modules": shared("lora_targets"),
    "lora_target_parameters": shared("lora_targets"),
    "lora_modules_to_save": shared("modules_to_save"),
    "peft_use_dora": shared("dora"),
    "peft_autocast_adapter_dtype": shared("adapter_dtype"),
    "optimizer": shared("optimizer"),
    "max_grad_norm": shared("max_grad_norm"),
    "gradient_checkpointing": shared("gradient_checkpointing"),
    "gradient_checkpointing_kwargs": shared("gradient_checkpointing"),
    "activation_offloading": shared("activation_offloading"),
    "attn_implementation": shared("attention"),
    "model_quantization_config": shared("precision"),
    "sample_packing": shared("packing"),
    "pad_to_sequence_len": shared("pad_to_multiple"),
    "pad_to_multiple_of": shared("pad_to_multiple"),
    "group_by_length": shared("group_by_length"),
    "max_packed_sequence_len": irrelevant("axolotl 0.19 ignores it"),
    "rl": shared("task"),
    "reward_model": shared("task"),
    "precompute_ref_log_probs": shared("reference"),
    "plugins": shared("loss, liger_kernels"),
    "torch_compile": used("compile", {True: "model", "auto": "model", False: None}),
    "datasets": shared("examples"),
    "pretraining_dataset": shared("examples"),
    "model_config": shared("router_loss"),
    "overrides_of_model_config": shared("router_loss"),
    "type_of_model": shared("task"),
    "unfrozen_parameters": shared("method"),
    "model_type": shared("task"),
} | table_of(
    (shared("precision"), "bf16 fp16 bfloat16 float16"),
    (
        shared("attention"),
        """
        flash_attention sdp_attention eager_attention xformers_attention flex_attention
        sage_attention
        """,
    ),
    (
        shared("loss, liger_kernels"),
        """
        liger_rope liger_rms_norm liger_layer_norm liger_swiglu liger_glu_activation
        liger_fused_linear_cross_entropy cut_cross_entropy
        """,
    ),
    (
        LEARNING,
        """
        learning_rate embedding_lr embedding_lr_scale weight_decay lr_scheduler lr_groups
        lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio
        lr_div_factor adam_epsilon adam_beta1 adam_beta2 warmup_steps warmup_ratio seed
        eta_min loraplus_lr_ratio loraplus_lr_embedding jagged_restart_steps
        jagged_restart_warmup_steps jagged_restart_anneal_steps peft_use_rslora
        rl_beta dpo_beta orpo_alpha simpo_gamma cpo_alpha
        kto_desirable_weight kto_undesirable_weight dpo_label_smoothing
        center_rewards_coefficient lora_fan_in_fan_out reinit_weights train_on_inputs
        loss_watchdog_threshold loss_watchdog_patience debug rpo_alpha
        peft_ensure_weight_tying mean_resizing_embeddings dpo_norm_loss
        jagged_restart_max_steps shuffle_merged_datasets shuffle_before_merging_datasets
        curriculum_sampling num_labels lora_alpha_pattern adam_beta3 adam_epsilon2
        lisa_layers_attribute lisa_step_interval eaft_alpha eaft_k torchdistx_path peft
        rope_scaling optim_args liger_use_token_scaling nvfp4_merge_aware_start_step
        """,
    ),
    (
        LOGGING,
        """
        logging_steps wandb_* swanlab_* mlflow_* comet_* trackio_* otel_* use_wandb
        use_mlflow use_swanlab use_comet use_trackio use_otel_metrics use_tensorboard
        hf_mlflow_log_artifacts include_tokens_per_second include_tkps profiler_steps
        profiler_steps_start gradio_*
        """,
    ),
    (
        SAVING,
        """
        output_dir saves_per_epoch save_steps save_strategy save_total_limit save_only_model
        save_safetensors save_first_step hub_model_id hub_strategy hub_revision
        load_best_model_at_end metric_for_best_model greater_is_better
        auto_resume_from_checkpoints dynamic_checkpoint merge_method
        fsdp_final_state_dict_type
        """,
    ),
    (
        TOKENS,
        """
        chat_template chat_template_jinja chat_template_kwargs special_tokens tokens
        eot_tokens added_tokens_overrides default_system_message tokenizer_type
        tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
        tokenizer_save_jinja_files min_sample_len max_prompt_len
        fix_untrained_tokens eval_sequence_len
        """,
    ),
    (
        LOADING,
        """
        dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory
        num_dataset_shards_to_save skip_prepare_dataset
        push_dataset_to_hub hf_use_auth_token dataloader_* remove_unused_columns
        trust_remote_code low_cpu_mem_usage lora_on_cpu revision_of_model device_map
        strict base_model_ignore_patterns
        experimental_skip_move_to_device streaming streaming_multipack_buffer_size
        pretrain_multipack_buffer_size pretrain_multipack_attn
        pretraining_sample_concatenation is_falcon_derived_model is_llama_derived_model
        is_mistral_derived_model is_qwen_derived_model sample_packing_group_size
        sample_packing_bin_size sample_packing_mp_start_method
        multipack_real_batches
        peft_init_lora_weights flex_attn_compile_kwargs torch_compile_backend
        torch_compile_mode device local_rank torch_compile_options
        cls_model_config is_preprocess preprocess_iterable total_num_tokens
        total_supervised_tokens sample_packing_eff_est axolotl_config_path
        qlora_sharded_model_loading dpo_loss_type dpo_loss_weights
        expert_parallel_* trl vllm ebft diffusion heads_k_stride ring_attn_func
        model_quantization_config_kwargs pose_* scaling_softmax_factor scaling_softmax_bias
        chunked_cross_entropy_num_chunks dpo_use_logits_to_keep
        role_boundaries quantization float32 embeddings_skip_upcast gc_collect_steps
        moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast liger_kernel_impl
        """,
    ),
    (
        GENERATING,
        """
        generate_samples num_generation_samples generation_* merge_lora eval_table_size
        eval_max_new_tokens dpo_generate_during_eval
        """,
    ),
    (
        assumed(NO_EVALUATION),
        "test_datasets evals_per_epoch eval_steps",
    ),
    (assumed(SET_ASIDE), "val_set_size"),
    (
        irrelevant("evaluation, which the estimate leaves out"),
        """
        eval_batch_size eval_sample_packing eval_strategy evaluation_strategy
        do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split
        """,
    ),
    (
        assumed(REPLACED),
        """
        lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel
        fused_attn_kernel use_kernels flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum
        liger_rms_norm_gated
        """,
    ),
    (assumed(EXPERT_KERNELS), "use_scattermoe use_sonicmoe"),
    (
        assumed(ALL_LOGITS),
        "liger_cross_entropy chunked_cross_entropy flash_attn_cross_entropy",
    ),
    (assumed(PADDED), "batch_flattening dpo_padding_free"),
    (assumed(ONE_MICRO_BATCH), "auto_find_batch_size"),
    (assumed(KEPT_CACHE), "torch_empty_cache_steps gc_steps"),
    (assumed("steps of LoRA; merges into the weights are not counted"), "relora"),
    (irrelevant("read only with relora"), "relora_*"),
    (
        assumed("SDPA's own kernels, which need more memory and time"),
        "large_head_attention flash_attn_d512 sdpa_varlen",
    ),
    (shared("attention"), "gemma4_hybrid_attn_impl"),
    (
        UNREAD,
        """
        kd_* grokfast_* hatchery_* lm_eval_* nemo_gym_* spectrum_* swanlab_* recipe save_compressed
        """,
    ),
    (ANOTHER_ADAPTER, "lora_model_dir"),
    (STOPS_EARLY, "early_stopping_patience"),
    (RESUMES, "resume_from_checkpoint"),
    (assumed("not applied: give --examples"), "dataset_shard_num dataset_exact_deduplication"),
    (irrelevant("which part of the data"), "dataset_shard_idx"),
    (assumed("best-fit packing, which fills rows better"), "sample_packing_sequentially"),
    (assumed("the whole model is on the GPU"), "gpu_memory_limit max_memory"),
    (used("long_examples", LONG_EXAMPLES), "excess_length_strategy"),
    (assumed("no noise, which takes next to no time"), "neftune_noise_alpha noisy_embedding_alpha"),
    (assumed("tf32 off: only products in fp32 are faster with it"), "tf32"),
    (assumed("the model's own vocabulary"), "resize_token_embeddings_to_32x shrink_embeddings"),
    (refused(SEVERAL_GPUS), "deepcompile"),
    (refused(SEVERAL_GPUS), "use_ray"),
    (shared("strategy"), "deepspeed fsdp fsdp_config fsdp_version accelerator_config ddp"),
    (shared("gpus, strategy"), "dp_shard_size dp_replicate_size"),
    (irrelevant("only on several GPUs"), "ddp_* ray_* resources_per_worker"),
    (
        refused(SEVERAL_GPUS, idle=(None, False, 0, 1)),
        """
        tensor_parallel_size context_parallel_size
        sequence_parallel_degree expert_parallel_size world_size
        """,
    ),
    (
        refused(IMAGES),
        """
        processor_type image_size image_resize_algorithm processor_kwargs
        """,
    ),
    (irrelevant("what reads images is frozen in an estimate"), "freeze_mm_modules"),
    (
        refused(NOT_SIMULATED),
        """
        peft_layers_to_transform peft_layers_pattern peft_layer_replication
        peft_trainable_token_indices lora_rank_pattern qat fp8 fp8_* fp32_norms fp32_norm_classes
        tiled_mlp tiled_mlp_* layer_offloading selective_checkpointing use_onebitllms
        llama4_linearized_experts lisa_n_layers process_reward_model trainer_cls s2_attention
        use_pose optim_target_modules qgalore_* dion_* ple_cpu_offload scaling_softmax dense_mixer
        use_mora mora kd_trainer hatchery llmcompressor use_eaft dpo_use_liger_kernel
        use_glm_dsa_kernels use_dsv4_kernels dsv4_* nonexpert_quantization gemma4_fp8_nonexpert
        gemma4_nf4_nonexpert nvfp4_merge_aware mora_type rl_adapter_ref_model dpo_use_weighting
        overrides_of_model_kwargs
        """,
    ),
)
"""Class of each key; a name that ends in ``_*`` is the prefix of several."""
