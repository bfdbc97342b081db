"""Class of each key of LLaMA-Factory, by its dataclasses of 0.9 (``llamafactory/hparams``)."""

from orchestrator.configurations.key_classes import (
    IMAGES,
    SOUND,
    TRAINS_TOWER,
    Key,
    assumed,
    irrelevant,
    refused,
    shared,
    table_of,
    used,
)
from orchestrator.configurations.trainers.axolotl_keys import (
    ANOTHER_ADAPTER,
    GENERATING,
    LOADING,
    LOGGING,
    NO_EVALUATION,
    NOT_SIMULATED,
    SAVING,
    SET_ASIDE,
    SEVERAL_GPUS,
    STOPS_EARLY,
    TOKENS,
)
from orchestrator.configurations.trainers.transformers_keys import (
    LEARNING,
    OTHER_VERSIONS,
    TRAINING_ARGUMENTS,
)

KEYS: dict[str, Key] = (
    TRAINING_ARGUMENTS
    | OTHER_VERSIONS
    | {
        "model_name_or_path": used("model"),
        "cutoff_len": shared("seq_len, cutoff"),
        "flash_attn": shared("attention"),
        "quantization_bit": shared("method, quantisation"),
        "quantization_method": shared("quantisation"),
        "quantization_type": shared("quantisation"),
        "double_quantization": shared("double_quantisation"),
        "lora_rank": shared("lora_rank"),
        "lora_alpha": shared("lora_alpha"),
        "lora_dropout": shared("lora_dropout"),
        "lora_target": shared("lora_targets"),
        "additional_target": shared("modules_to_save"),
        "use_dora": used("dora"),
        "pure_bf16": shared("precision"),
        "disable_gradient_checkpointing": shared("gradient_checkpointing"),
        "use_reentrant_gc": shared("gradient_checkpointing"),
        "enable_liger_kernel": shared("liger_kernels, loss"),
        "freeze_trainable_layers": shared("trained_layers"),
        "freeze_trainable_modules": shared("trained_layers"),
        "use_llama_pro": shared("spread_layers"),
        "oft_block_size": shared("oft_block_size"),
        "oft_rank": shared("oft_block_size"),
        "oft_target": shared("lora_targets"),
        "module_dropout": shared("oft_block_size"),
        "moe_aux_loss_coef": shared("router_loss"),
        "use_muon": shared("optimizer"),
        "use_dft_loss": shared("loss"),
        "use_eaft_loss": shared("loss"),
        "stage": shared("task"),
        "pref_loss": shared("reference"),
        "finetuning_type": shared("method"),
        "do_train": shared("task"),
        "packing": shared("packing"),
        "neat_packing": shared("packing"),
        "max_samples": assumed("not applied: give --examples"),
        "dataset": assumed("not read: lengths and examples come from --dataset, or are assumed"),
    }
    | table_of(
        (
            irrelevant("disable_gradient_checkpointing decides"),
            "gradient_checkpointing activation_checkpointing",
        ),
        (
            LOADING,
            "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        ),
    )
    | table_of(
        (
            LEARNING,
            """
            pref_beta pref_ftx pref_bco_weight kto_* dpo_label_smoothing simpo_gamma
            loraplus_lr_ratio loraplus_lr_embedding use_rslora pissa_init
            pissa_iter pissa_convert train_on_prompt mask_history ld_alpha
            mix_strategy interleave_probs disable_shuffling ppo_*
            create_new_adapter adapter_folder
            reward_model reward_model_* train_from_scratch init_special_tokens rope_scaling
            """,
        ),
        (LOGGING, "plot_loss include_effective_tokens_per_second use_swanlab swanlab_* profiler_*"),
        (SAVING, "export_*"),
        (
            TOKENS,
            """
            template tool_format default_system enable_thinking preserve_thinking
            split_special_tokens add_tokens add_special_tokens new_special_tokens_config
            use_fast_tokenizer
            """,
        ),
        (
            LOADING,
            """
            dataset_dir media_dir overwrite_cache preprocessing_batch_size tokenized_path
            preprocessing_num_workers streaming buffer_size data_shared_file_system
            ignore_pad_token_for_loss cache_dir model_revision low_cpu_mem_usage trust_remote_code
            offload_folder hf_hub_token ms_hub_token om_hub_token print_param_status use_kv_cache
            quantization_device_map ddp_timeout
            """,
        ),
        (
            GENERATING,
            """
            infer_* vllm_* sglang_* do_sample temperature top_p top_k num_beams max_length
            max_new_tokens repetition_penalty length_penalty skip_special_tokens eval_num_beams
            """,
        ),
        (assumed(NO_EVALUATION), "eval_dataset"),
        (assumed(SET_ASIDE), "val_size"),
        (irrelevant("evaluation"), "eval_on_each_dataset compute_accuracy"),
        (ANOTHER_ADAPTER, "adapter_name_or_path"),
        (STOPS_EARLY, "early_stopping_steps"),
        (assumed("PEFT's and transformers' own layers"), "use_v1_kernels"),
        (assumed("the model's own vocabulary"), "resize_vocab"),
        (assumed("norms in the dtype of the model"), "upcast_layernorm"),
        (assumed("the loss alone casts logits to fp32"), "upcast_lmhead_output"),
        (
            assumed("checkpoints stay on the GPU, which takes more memory and less time"),
            "use_unsloth_gc",
        ),
        (
            refused(SEVERAL_GPUS, idle=(None, False, 0, 1)),
            """
            ray_num_workers use_mca tensor_model_parallel_size pipeline_model_parallel_size
            expert_model_parallel_size
            """,
        ),
        (
            refused(IMAGES),
            "image_* crop_to_patches",
        ),
        (
            refused(TRAINS_TOWER, idle=(None, True)),
            "freeze_vision_tower freeze_multi_modal_projector",
        ),
        (irrelevant("only of videos"), "video_*"),
        (
            refused(SOUND),
            "audio_sampling_rate use_audio_in_video",
        ),
        (
            refused(NOT_SIMULATED),
            """
            use_galore use_apollo use_badam use_adam_mini use_unsloth
            shift_attn mixture_of_depths use_kt use_hyper_parallel fp8 use_asft_loss
            freeze_language_model freeze_extra_modules ref_model ref_model_*
            """,
        ),
        (refused("use enable_liger_kernel, by which the loss is known"), "use_liger_kernel"),
        (
            irrelevant("read only with a method that is refused"),
            """
            galore_* apollo_* badam_* asft_alpha eaft_alpha fp8_* kt_*
            hyper_parallel_args
            """,
        ),
    )
)
