"""Which tests `make test` leaves out: those that take long, or repeat for a further case what another shows.

By file, then by function: of its cases each n-th stays in the fast tier, 0 keeps none; "*" speaks for all that the file's other
lines don't name. A file or function that is not here stays whole. Tests may also carry `@pytest.mark.slow` themselves.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SLOW: dict[str, dict[str, int]] = {
    "unit/bench/test_train.py": {
        "test_the_same_samples_packed_padded_and_under_transformers": 0,
        "test_a_setting_that_fails_is_told_and_the_next_one_runs": 0,
        "test_what_makes_no_sense_is_refused": 5,
    },
    "unit/bench/test_rows.py": {
        "test_rows_side_by_side_are_to_transformers_what_they_are_alone": 9,
        "test_zoo_and_transformers_train_on_the_same_samples": 0,
        "test_a_medium_that_leaves_no_room_for_text_is_refused": 0,
    },
    "unit/benchmarks/test_balance.py": {
        "test_rows_are_full_and_ranks_even": 0,
        "test_table_and_json_say_the_same": 0,
    },
    "unit/bench/test_data.py": {"test_rows_are_measured_without_encoding_where_nothing_changes_them": 0},
    "unit/benchmarks/test_packing.py": {
        "test_bytes_grow_with_the_tokens": 0,
        "test_bytes_moved_are_at_most_one_and_a_half_times_those_of_index_select": 0,
    },
    "unit/engine/tools/test_convert_layouts.py": {
        "test_names_and_bytes_come_back_in_every_published_layout": 2
    },
    "parity/test_vocabulary.py": {"test_new_rows_are_the_mean_and_are_exported": 2},
    "unit/bridge/test_qwen3_asr.py": {"test_names_and_shapes_are_those_of_transformers": 2},
    "unit/bridge/test_qwen25_omni.py": {"test_the_table_covers_names_and_shapes": 0},
    "unit/data/processors/test_qwen25_omni_processor.py": {"test_saved_files_load_by_auto_and_by_us": 0},
    "unit/bridge/test_gemma3.py": {"test_the_table_covers_names_and_shapes": 0},
    "unit/bridge/test_gemma4.py": {"test_the_table_covers_names_and_shapes": 0},
    "unit/nn/test_reach.py": {"test_a_whole_row": 4, "test_a_context_parallel_rank": 5},
    "unit/bridge/test_published_names.py": {"*": 9},
    "unit/bridge/test_internvl.py": {"test_the_table_covers_names_and_shapes": 3},
    "unit/bridge/test_glm45v.py": {"test_the_table_covers_names_and_shapes": 0},
    "unit/bridge/test_qwen25_vl.py": {"test_the_table_covers_names_and_shapes": 4},
    "unit/bridge/test_export.py": {"test_under_gloo": 0},
    "unit/bridge/test_quantised.py": {"test_blocks_that_are_cut_short_and_every_slice": 0},
    "unit/cli/test_plan.py": {
        "test_a_plan_says_nothing_else": 0,
        "test_sizes_that_are_given_and_do_not_fit": 0,
    },
    "unit/config/test_foreign.py": {"test_common_names": 6},
    "unit/config/test_recipes.py": {
        "test_a_recipe_resolves_at_every_size_and_on_all_hardware": 60,
        "test_parameters_of_every_size": 3,
        "test_parameters_of_a_thinker": 3,
    },
    "unit/config/test_text_sizes.py": {"test_parameters_of_every_size": 10},
    "unit/config/test_resume.py": {"test_every_fixed_key_is_compared": 10},
    "unit/data/loading/test_defaults.py": {"test_none_evaluates_nothing": 20},
    "unit/data/loading/test_lengths.py": {
        "test_a_hundred_thousand_samples_leave_nothing_behind": 0,
        "test_another_global_batch_continues_with_the_same_bins": 0,
    },
    "unit/data/media/test_bounds.py": {"test_a_worker_keeps_its_bounds": 10, "test_lines_without_end": 8},
    "unit/data/sources/test_sources.py": {"test_a_mixture_is_drawn_and_resumed_to_the_sample": 0},
    "unit/nn/test_config_keys.py": {
        "test_every_key_is_used_or_refused_or_in_the_list": 14,
        "test_nested_configs_are_objects": 12,
        "test_keys_that_a_config_does_not_have_change_neither_model": 5,
        "test_what_transformers_takes_and_no_model_here_has": 3,
        "test_who_says_whether_the_head_is_the_embedding": 4,
        "test_numbers_have_bounds_and_types": 2,
        "test_transformers_ignores_what_is_in_the_list": 3,
    },
    "unit/nn/test_kernels.py": {
        "test_a_model_of_interpreted_kernels_equals_one_of_plain_pytorch": 0,
        "test_they_compile_for_a_gpu_without_running_out_of_registers": 0,
        "test_interpreted_kernels_equal_plain_pytorch": 0,
        "test_updates_in_one_kernel_are_those_of_plain_pytorch": 0,
    },
    "unit/planner/test_layouts.py": {
        "test_a_size_on_every_machine": 0,
        "test_a_plan_in_numbers": 2,
        "test_a_model_that_cannot_fit_is_refused_with_a_fix": 2,
        "test_published_models_fit_whole": 8,
        "test_a_plan_says_what_each_measure_saves": 0,
        "test_layers_that_stages_do_not_divide": 0,
    },
    "unit/planner/test_fit_table.py": {"test_a_line_of_the_table": 12},
    "unit/planner/test_speed.py": {"*": 0},
    "unit/engine/report/test_startup_time.py": {"test_a_run_says_where_its_first_seconds_went": 0},
    "unit/engine/distributed/test_object_group.py": {
        "test_the_first_rank_s_view_is_everybody_s": 0,
        "test_the_newest_checkpoint_to_start_from_is_the_first_rank_s": 0,
        "test_ranks_with_different_recipes_are_refused": 0,
    },
    "unit/engine/watchdog/test_progress.py": {
        "test_a_save_that_gets_on_is_seen_to": 5,
        "test_one_that_hangs_shows_no_sign": 3,
    },
    "unit/engine/megatron/test_compat.py": {"test_another_version_of_megatron_core_switches_no_shim_off": 0},
    "unit/engine/tools/test_verify.py": {
        "test_transformers_model_is_that_of_the_model_type": 4,
        "test_a_tied_head_that_differs_is_found": 0,
    },
    "unit/engine/tools/test_convert_folders.py": {"test_a_tied_head_that_differs_is_refused": 3},
    "unit/inspection/test_rows.py": {"test_every_token_is_in_one_span": 4},
    "unit/engine/launch/test_kernel_cache.py": {"test_it_is_said_before_megatron_core_is_imported": 0},
    "unit/engine/train/test_kernel_check.py": {
        "test_every_kernel_of_a_recipe_and_a_wrong_one": 4,
        "test_the_check_before_training_is_made_once": 0,
        "test_a_wrong_kernel_stops_the_run_and_says_what_to_change": 2,
    },
    "unit/test_turns.py": {
        "test_what_fails_alone_too_fails_the_run": 0,
        "test_a_slow_case_that_fails_runs_once_more": 0,
    },
    "unit/data/processors/test_labels.py": {"test_labels_say_what_the_assistant_says": 3},
    "unit/data/media/test_sound.py": {"test_compressed_sound": 5},
    "unit/config/test_validate.py": {"test_a_recipe_that_cannot_run": 2},
    "unit/data/media/test_sizes.py": {"test_images_of_any_shape": 4},
    "unit/config/test_reader.py": {"test_programs_give_values_of_the_same_bounds": 0},
    "unit/engine/watchdog/test_run_lock.py": {"test_of_many_starts_in_one_moment_one_wins": 3},
    "unit/config/test_llava_sizes.py": {"test_parameters_of_every_size": 4},
    "unit/engine/launch/test_launcher.py": {"test_ranks_end_when_the_launcher_is_killed": 2},
    "parity/test_accumulate.py": {"test_the_gradient_is_the_same": 6},
    "parity/test_calls.py": {
        "test_alternating_calls_give_what_a_fresh_model_gives": 4,
        "test_a_call_writes_nothing_on_the_modules": 2,
    },
    "parity/test_flops.py": {"test_flops_of_a_sample_by_part": 20},
    "parity/test_generate.py": {"test_greedy_answers_are_those_of_transformers": 20},
    "parity/test_gemma3.py": {
        "test_other_architectures": 13,
        "test_every_gradient": 6,
        "test_rows_packed": 3,
        "test_rows_packed_backwards": 0,
        "test_rows_by_themselves": 0,
        "test_rows_from_a_padded_batch": 9,
        "test_activations_made_again_give_the_same_gradients": 0,
        "test_tied_embeddings": 0,
        "test_the_window_is_counted_within_a_segment": 0,
    },
    "parity/test_gemma3_weights.py": {"test_what_goes_in_comes_out_as_published": 6},
    "parity/test_gemma4.py": {
        "test_settings_that_change_the_arithmetic": 0,
        "test_every_gradient": 6,
        "test_rows_packed": 0,
        "test_rows_packed_backwards": 0,
        "test_rows_by_themselves": 0,
        "test_rows_from_a_padded_batch": 0,
        "test_activations_made_again_give_the_same_gradients": 0,
    },
    "parity/test_gemma4_weights.py": {"*": 0},
    "parity/test_grid_positions.py": {"test_positions_of_any_pack": 2},
    "parity/test_glm45v.py": {
        "test_other_architectures": 0,
        "test_what_is_refused": 3,
        "test_every_gradient": 6,
        "test_rows_packed": 3,
        "test_rows_packed_backwards": 0,
        "test_rows_by_themselves": 0,
        "test_rows_from_a_padded_batch": 9,
        "test_activations_made_again_give_the_same_gradients": 0,
        "test_tied_embeddings": 0,
    },
    "parity/test_glm45v_weights.py": {"test_what_goes_in_comes_out_as_published": 4},
    "parity/test_llava.py": {
        "test_other_architectures": 7,
        "test_every_gradient": 7,
        "test_rows_from_a_padded_batch": 10,
        "test_activations_made_again_give_the_same_gradients": 3,
        "test_one_placeholder_a_medium_gives_the_same": 7,
    },
    "parity/test_llava_weights.py": {"test_what_goes_in_comes_out_as_published": 9},
    "parity/test_lora.py": {
        "test_what_peft_is_told": 7,
        "test_peft_gives_the_same_logits": 14,
        "test_peft_gives_the_same_gradients": 14,
        "test_a_part_of_the_linears": 6,
        "test_an_adapter_is_gone_on_with_and_merged": 9,
        "test_layers_that_are_made_again_drop_the_same": 0,
    },
    "parity/test_qwen3_asr.py": {
        "test_other_architectures": 0,
        "test_every_gradient": 6,
        "test_rows_packed": 3,
        "test_rows_packed_backwards": 0,
        "test_rows_by_themselves": 0,
        "test_rows_from_a_padded_batch": 9,
        "test_activations_made_again_give_the_same_gradients": 0,
        "test_tied_embeddings": 0,
        "test_what_goes_in_comes_out_as_published": 2,
    },
    "parity/test_timed_positions.py": {
        "test_positions_of_any_mixture": 2,
        "test_positions_restart_in_each_segment": 2,
        "test_positions_of_the_real_rows": 2,
    },
    "parity/test_qwen25_omni_weights.py": {"test_what_goes_in_comes_out_as_published": 4},
    "parity/test_qwen25_omni.py": {
        "test_what_is_refused": 6,
        "test_other_architectures": 0,
        "test_every_gradient": 6,
        "test_rows_packed": 3,
        "test_rows_packed_backwards": 0,
        "test_rows_by_themselves": 0,
        "test_rows_from_a_padded_batch": 0,
        "test_activations_made_again_give_the_same_gradients": 0,
        "test_text_alone_leaves_the_tower_a_zero_gradient": 0,
        "test_tied_embeddings": 0,
        "test_a_checkpoint_of_the_whole_model": 0,
        "test_transformers_loads_the_thinker_of_a_whole_model": 0,
    },
    "parity/test_internvl.py": {
        "test_the_rows_are_what_they_should_be": 3,
        "test_every_gradient": 20,
        "test_configs_that_are_not_built_are_refused": 1,
        "*": 0,
    },
    "parity/test_internvl_weights.py": {"test_what_goes_in_comes_out_as_published": 8},
    "parity/test_qwen25_vl.py": {
        "test_other_architectures": 20,
        "test_every_gradient": 6,
        "test_rows_packed": 3,
        "test_rows_packed_backwards": 0,
        "test_rows_by_themselves": 0,
        "test_rows_from_a_padded_batch": 9,
        "test_activations_made_again_give_the_same_gradients": 0,
        "test_tied_embeddings": 0,
    },
    "parity/test_qwen25_vl_weights.py": {"test_what_goes_in_comes_out_as_published": 4},
    "parity/test_qwen35_vl.py": {
        "test_other_architectures_or_an_error": 16,
        "test_every_gradient": 9,
        "test_rows_from_a_padded_batch": 7,
        "test_activations_made_again_give_the_same_gradients": 3,
    },
    "parity/test_mtp.py": {"test_multi_token_prediction": 13, "test_metrics_of_both_losses": 2},
    "parity/test_qwen35_vl_weights.py": {"test_what_goes_in_comes_out": 4},
    "parity/test_qwen3_omni_variants.py": {"test_logits_or_an_error": 7},
    "parity/test_qwen3.py": {
        "test_other_architectures_or_an_error": 7,
        "test_every_gradient": 7,
        "test_rows_by_themselves": 0,
        "test_rows_packed": 4,
        "test_rows_packed_backwards": 0,
        "test_rows_from_a_padded_batch": 7,
        "test_activations_made_again_give_the_same_gradients": 0,
    },
    "parity/test_gemma3_text.py": {
        "test_other_architectures": 5,
        "test_every_gradient": 5,
        "test_rows_by_themselves": 0,
        "test_rows_packed": 0,
        "test_rows_packed_backwards": 0,
        "test_rows_from_a_padded_batch": 0,
        "test_activations_made_again_give_the_same_gradients": 0,
    },
    "parity/test_qwen3_next.py": {
        "test_other_architectures_or_an_error": 12,
        "test_every_gradient": 5,
        "test_rows_by_themselves": 0,
        "test_rows_packed": 0,
        "test_rows_packed_backwards": 0,
        "test_rows_from_a_padded_batch": 7,
        "test_activations_made_again_give_the_same_gradients": 0,
    },
    "parity/test_text_weights.py": {
        "test_what_goes_in_comes_out_as_published": 4,
        "test_a_tied_head_that_is_stored_all_the_same": 0,
    },
    "unit/bridge/test_text_families.py": {"test_the_tables_cover_names_and_shapes": 20},
    "parity/test_qwen3_vl.py": {
        "test_deepstack_from_other_layers": 8,
        "test_other_architectures_or_an_error": 10,
        "test_every_gradient": 5,
        "test_rows_from_a_padded_batch": 7,
        "test_activations_made_again_give_the_same_gradients": 3,
        "test_the_top_level_says_whether_embeddings_are_tied": 3,
    },
    "parity/test_qwen3_vl_weights.py": {"test_what_goes_in_comes_out_as_published": 4},
    "cli/test_alive.py": {"*": 0},
    "cli/test_bad_input.py": {
        "test_adapters": 0,
        "test_a_bad_row_ends_the_run_where_it_is_not_to_be_skipped": 4,
        "test_overlong_rows_are_dropped_or_cut": 0,
        "test_bad_rows_are_left_out_counted_and_listed": 0,
        "test_a_file_without_usable_rows": 0,
    },
    "cli/test_bad_steps.py": {"*": 0},
    "cli/test_caller.py": {"*": 0},
    "cli/test_documentation.py": {"*": 0, "test_every_block_is_run_or_listed": 1},
    "cli/test_examples.py": {"*": 0, "test_every_example_is_run": 1},
    "cli/test_interrupt.py": {"*": 0, "test_before_the_first_step_nothing_is_written": 1},
    "cli/test_label_weights.py": {"*": 0},
    "cli/test_launchers.py": {"*": 0},
    "cli/test_other_package.py": {"*": 0, "test_nothing_here_knows_it": 1},
    "cli/test_ranks.py": {"*": 0},
    "cli/test_resources.py": {"*": 0, "test_too_little_address_space_is_said_before_anything_hangs": 1},
    "cli/test_resume.py": {"*": 0},
    "cli/test_train.py": {
        "test_another_models_run_folder_is_refused": 0,
        "test_own_data_alone": 0,
        "test_more_steps_go_on_from_a_finished_run": 0,
        "test_on_a_terminal_there_is_a_live_line": 0,
        "test_a_finished_run_is_left_as_it_is": 0,
    },
    "distributed/test_bad_steps.py": {
        "*": 0,
        "test_steps_without_labels_are_counted_and_no_spike_among_the_others": 1,
        "test_rows_without_any_label_are_refused_before_the_first_step": 1,
    },
    "distributed/test_checkpoints.py": {"*": 0},
    "distributed/test_exchanges.py": {
        "test_ranks_exchange_the_metrics_of_a_step_once": 0,
        "test_values_come_by_rank": 3,
    },
    "distributed/test_foreign_loop.py": {"*": 8},
    "distributed/test_graphs.py": {"*": 0},
    "distributed/test_golden.py": {"*": 0},
    "distributed/test_lora.py": {"*": 0, "test_gradients_of_adapters": 100},
    "distributed/test_lora_runs.py": {"*": 0},
    "distributed/test_out_of_memory.py": {"*": 0},
    "distributed/test_matrix.py": {"test_context_parallel_ranks_may_hold_samples_whole": 4},
    "distributed/test_padding.py": {"test_poisoned_padding": 8},
    "distributed/test_parity.py": {"*": 0, "test_images_lie_across_context_parallel_chunks": 1},
    "distributed/test_plan.py": {"*": 0},
    "distributed/test_pool.py": {"*": 0},
    "distributed/test_quantised.py": {"*": 0},
    "distributed/test_same_run.py": {"*": 0},
    "distributed/test_saving.py": {"*": 0, "test_a_checkpoint_is_whole_and_says_what_it_is": 1},
    "distributed/test_training.py": {"*": 0},
    "distributed/test_vocabulary.py": {
        "test_any_layout_trains_them_as_one_rank_does": 0,
        "test_without_the_key_it_is_one_sentence": 2,
    },
}


_seen: Counter[str] = Counter()  # cases of each function so far


def mark(item: pytest.Item) -> None:
    """Mark the test where SLOW leaves it out; called once for each, in the order of collection."""
    if not item.path.is_relative_to(TESTS):
        return
    table = SLOW.get(item.path.relative_to(TESTS).as_posix(), {})
    every = table.get(getattr(item, "originalname", item.name), table.get("*", 1))
    place = item.nodeid.partition("[")[0]
    number = _seen[place]
    _seen[place] += 1
    if every == 0 or number % every:
        item.add_marker(pytest.mark.slow)
