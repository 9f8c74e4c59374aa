"""Every mechanism has a case among the tests that `pytest` runs as README calls it, compiled where it compiles."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LEFT_OUT = ("full", "slow", "nightly", "vllm", "mosaic", "compat", "sandbox", "browser")
MECHANISMS = {
    "a GRPO run: rollout, update, evaluation, checkpoint": "recipes/test_recipes.py::test_a_run_leaves_everything_behind",
    "an export that transformers reads": "recipes/test_recipes.py::test_the_export_opens_in_transformers_with_the_trainers_log_probs",
    "a critic of its own, a moving reference": "recipes/test_options_algorithm.py::test_the_critic_has_its_own_learning_rate",
    "dynamic sampling": "recipes/test_options_algorithm.py::test_refill_replaces_groups_without_signal",
    "supervised training": "recipes/test_endings.py::test_a_save_that_failed_in_the_background_is_made_again_at_the_end",
    "pairs of preference": "recipes/test_preference.py::test_a_run_begins_at_its_reference_and_learns_the_order",
    "distillation": "kernels/test_divergence.py::test_values_and_gradients_are_those_of_full_logits",
    "adapters": "recipes/test_lora_runs.py::test_a_checkpoint_holds_adapters_their_moments_and_the_base_s_digest",
    "adapter files": "models/test_peft.py::test_a_folder_of_ours_comes_back_from_peft_byte_for_byte",
    "adapter sets": "training/test_several.py::test_one_update_of_two_adapters_is_the_two_updates_of_one",
    "reward models, trained": "recipes/test_reward_model.py::test_pairs_are_learnt_and_told",
    "reward models, scoring": "recipes/test_judge.py::test_an_episode_is_scored_by_its_last_sequence",
    "reward workers": "rewards/test_rewards_pool.py::test_every_end_has_its_outcome",
    "records and replays, which forks begin with": "recipes/test_replay.py::test_a_replay_is_bitwise",
    "certificates": "test_certify.py::test_a_defect_of_loss_or_advantage_is_found",
    "differences of runs": "test_diff.py::test_what_is_no_run_is_said",
    "episodes": "envs/test_env_options.py::test_history",
    "credit by turn": "envs/test_credit.py::test_returns_and_gae_with_rewards_of_turns_are_the_double_sums",
    "rollouts ahead of training": "rollout/test_ahead.py::test_every_group_is_used_once_in_order_within_the_bound",
    "the contract of engines": "rollout/test_rollout_conformance.py::test_logprobs_are_the_scorers_at_that_temperature",
    "the embedded sampler": "rollout/test_rollout_engine.py::test_samples_are_bitwise_the_same_under_permutation_refill_and_other_neighbours",
    "parked conversations": "rollout/test_parked.py::test_a_conversation_is_what_prefilling_every_turn_gives",
    "truncated sampling": "rollout/test_sampler_math.py::test_draws_follow_the_truncated_distribution",
    "weights for vLLM": "rollout/test_vllm_parts.py::test_chunks_are_the_exported_tensors",
    "attention": "kernels/test_attention.py::test_gradients_agree",
    "attention over a ring": "kernels/test_attention_ring.py::test_a_ring_is_attention_over_whole_rows",
    "attention of a shared prompt": "kernels/test_attention_shared.py::test_tpu_kernel",
    "kernels of experts": "kernels/test_experts.py::test_experts_without_a_gate",
    "log-probs without logits": "kernels/test_logprob.py::test_kept_logits_are_those_that_would_be_made_again",
    "low precision": "kernels/test_low_precision.py::test_a_row_does_not_know_its_neighbours",
    "models beside transformers": "models/test_models.py::test_every_entry_matters_and_agrees",
    "models of experts": "models/test_models_experts.py::test_logits_equal_transformers",
    "recurrent layers": "kernels/test_recurrence_packed.py::test_rows_drawn_at_random",
    "models of recurrent layers": "models/test_hybrid.py::test_logits_equal_transformers",
    "images in turns": "envs/test_image_turns.py::test_grey_pictures_of_a_control",
    "towers for images": "models/test_vision.py::test_logits_equal_transformers",
    "videos": "models/test_video.py::test_logits_equal_transformers",
    "quantized bases": "models/test_quantized.py::test_the_product_and_its_gradient_are_those_of_the_dense_kernel",
    "scoring in packed rows": "training/test_training.py::test_scoring_agrees_with_the_update_forward_on_the_same_layout",
    "biases of routers": "training/test_router.py::test_the_bias_of_routers_follows_the_load",
    "replayed routes": "training/test_routes.py::test_scored_experts_are_replayed_whole",
    "streamed updates": "training/test_streaming.py::test_an_update_in_host_memory_is_the_update",
    "meshes": "sharding/test_sharding.py::test_experts_on_meshes",
    "processes": "processes/test_hosts.py::test_processes_that_disagree_are_named_and_do_not_hang",
    "checkpoints on other meshes": "test_checkpoint.py::test_restored_on_any_number_of_devices",
    "the training service": "service/test_protocol.py::test_a_loop_learns_saves_and_samples",
    "plans": "planning/test_plan.py::test_what_is_counted_is_what_the_programs_hold",
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_has_a_case(mechanism):
    """No mark on the test or on its file leaves it out."""
    path, name = MECHANISMS[mechanism].split("::")
    body = ast.parse((HERE / path).read_text("utf-8")).body
    found, = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    of_file = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    named = [re.findall(r"pytest\.mark\.(\w+)(?!.*parametrize)", ast.unparse(node)) for node in of_file + found.decorator_list
             if "parametrize" not in ast.unparse(node) and "first_cases" not in ast.unparse(node)]
    assert not set(LEFT_OUT).intersection(*[sum(named, [])])
