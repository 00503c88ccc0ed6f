"""The parts of training that have an oracle; tests/lab/model/test_shipped_training.py runs the whole recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from giornata_lab.model import architecture, latents
from giornata_lab.model.painter import Painter
from giornata_lab.model.scenes import sample, scene
from giornata_lab.model.train import guidance, stage
from giornata_lab.model.train.muon import Muon, orthogonalise
from giornata_lab.model.train.run import weighted_error
from giornata_lab.model.yardstick import architecture as yardstick


def test_tokens_lie_as_in_the_pipeline() -> None:
    z = torch.randn(2, architecture.LATENT_CHANNELS, 12, 12)
    tokens = latents.pack(z)
    torch.testing.assert_close(
        tokens, FluxFillPipeline._pack_latents(z, 2, z.shape[1], 12, 12), rtol=0, atol=0
    )
    torch.testing.assert_close(latents.unpack(tokens), z, rtol=0, atol=0)
    ids = FluxFillPipeline._prepare_latent_image_ids(1, 6, 6, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(latents.positions(6), ids, rtol=0, atol=0)
    moved = latents.positions(6, 3, 5) - latents.positions(6)
    assert (moved == torch.tensor([0, 3, 5])).all()


def test_a_masks_pixels_stay_in_their_token() -> None:
    mask = torch.zeros(1, 48, 48)
    mask[0, 17, 42] = 1
    tokens = latents.pack_mask(mask)
    assert tokens.shape == (1, 36, 64)
    assert tokens[0].any(-1).nonzero().flatten().tolist() == [2 * 6 + 5]


def test_every_word_is_one_token_and_every_caption_fits() -> None:
    text = architecture.text_encoders()
    for word in scene.words():
        assert len(text.t5_tokenizer(word).input_ids) == 2, word  # and the end
        assert len(text.clip_tokenizer(word).input_ids) == 3, word  # and both ends
    for seed in range(500):
        caption = sample(np.random.default_rng((1, seed)), 48).caption
        assert len(text.t5_tokenizer(caption).input_ids) <= architecture.TEXT_TOKENS


def test_an_untrained_transformer_says_nothing() -> None:
    model = architecture.transformer()
    assert not model.proj_out.weight.any()
    assert not model.transformer_blocks[0].norm1.linear.weight.any()


def test_an_untrained_unet_predicts_nothing_and_adds_nothing() -> None:
    model = yardstick.unet()
    seen = torch.randn(1, model.config.in_channels, 16, 16)
    assert not model(seen, 500, torch.randn(1, yardstick.TEXT_TOKENS, yardstick.TEXT_WIDTH)).sample.any()
    blocks = [module for module in model.modules() if isinstance(module, (ResnetBlock2D, Transformer2DModel))]
    assert len(blocks) == 11 + 7
    for block in blocks:
        last = block.conv2 if isinstance(block, ResnetBlock2D) else block.proj_out
        assert not last.weight.any()


def test_the_yardstick_is_small_enough_to_ship() -> None:
    text = yardstick.text_encoder()
    parts = yardstick.unet(), text.clip, architecture.autoencoder(yardstick.LATENTS)
    assert 2 * sum(map(architecture.parameters, parts)) < 14e6, "bytes of bfloat16"
    for word in scene.words():
        assert len(text.tokenizer(word).input_ids) == 3, word  # and both ends
    for seed in range(500):
        caption = sample(np.random.default_rng((1, seed)), 48).caption
        assert len(text.tokenizer(caption).input_ids) <= yardstick.TEXT_TOKENS


def test_the_autoencoder_begins_with_a_narrow_posterior() -> None:
    posterior = architecture.autoencoder().encode(torch.rand(1, 3, 32, 32)).latent_dist
    assert torch.allclose(posterior.logvar, torch.tensor(architecture.FIRST_LOG_VARIANCE))


def test_what_lies_far_from_a_mask_is_encoded_the_same_but_for_the_norms() -> None:
    """No attention in the middle: a changed corner reaches the other one by the norms' statistics alone."""
    vae = architecture.autoencoder()
    for module in vae.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.forward = lambda x: x  # type: ignore[assignment, method-assign]
    whole = torch.rand(1, 3, 128, 128)
    masked = whole.clone()
    masked[..., :16, :16] = 0
    a, b = (vae.encode(x).latent_dist.mode() for x in (whole, masked))
    torch.testing.assert_close(a[..., 24:, 24:], b[..., 24:, 24:], rtol=0, atol=1e-5)
    assert not torch.allclose(a[..., :4, :4], b[..., :4, :4])


@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    found = orthogonalise(matrices)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    aligned = (found * (u @ v)).sum((1, 2)) / (found.norm(dim=(1, 2)) * (u @ v).norm(dim=(1, 2)))
    assert aligned.min() > 0.97, "the nearest orthogonal matrix (Higham, 1986)"


def test_muon_finds_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    truth, x = torch.randn(8, 6), torch.randn(200, 6)
    weight = torch.nn.Parameter(torch.zeros(8, 6))
    optimiser = Muon([weight], lr=0.1)
    for step in range(400):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / 400)
        optimiser.zero_grad()
        ((x @ weight.T - x @ truth.T) ** 2).mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    torch.testing.assert_close(weight.detach(), truth, rtol=0, atol=0.02)


def test_muon_takes_kernels_as_matrices() -> None:
    kernel = torch.nn.Parameter(torch.zeros(4, 3, 3, 3))
    kernel.grad = torch.randn(4, 3, 3, 3)
    Muon([kernel], lr=1.0).step()
    assert kernel.shape == (4, 3, 3, 3)
    assert 0.1 < kernel.detach().square().mean().sqrt() < 0.3


def test_masked_tokens_weigh_more() -> None:
    velocity, target = torch.zeros(1, 2, 3), torch.tensor([[[1.0] * 3, [2.0] * 3]])
    neither = weighted_error(velocity, target, torch.zeros(1, 2, dtype=torch.bool))
    second = weighted_error(velocity, target, torch.tensor([[False, True]]))
    assert neither == pytest.approx((1 + 4) / 2)
    assert second == pytest.approx((1 + 8 * 4) / 9)


def test_rows_of_more_importance_weigh_more() -> None:
    predicted, target = torch.zeros(2, 1, 1), torch.tensor([[[1.0]], [[2.0]]])
    masked = torch.zeros(2, 1, dtype=torch.bool)
    assert weighted_error(predicted, target, masked, torch.tensor([3.0, 0.5])) == pytest.approx((3 + 2) / 2)


def test_guidance_of_one_is_none_and_thirty_is_usual() -> None:
    scales = guidance.classifier_free_scale(torch.tensor([1.0, 30.0, guidance.GREATEST]))
    assert scales[0] == 1
    assert 3 < scales[1] < 4
    assert scales[2] < 6.5


def test_levelled_guidance_is_everywhere_what_it_was_at_one() -> None:
    torch.manual_seed(0)
    painter = Painter(architecture.transformer(), architecture.text_encoders())
    embed = painter.transformer.time_text_embed
    torch.nn.init.normal_(embed.guidance_embedder.linear_2.weight)
    time, pooled = torch.tensor([500.0]), torch.randn(1, architecture.TEXT_WIDTH)

    def embedded(scale: float) -> torch.Tensor:
        found: torch.Tensor = embed(time, torch.tensor([1000 * scale]), pooled)
        return found

    before = embedded(1.0)
    assert not torch.allclose(embedded(30.0), before)
    guidance.level_guidance(painter)
    for scale in (1.0, 30.0, 60.0):
        torch.testing.assert_close(embedded(scale), before)


def test_a_state_is_written_whole_and_read_without_unpickling(tmp_path: Path) -> None:
    path = tmp_path / "run" / "state.pt"
    assert stage.load(path) is None
    stage.save(path, {"step": 3, "weights": {"a": torch.ones(2)}})
    state = stage.load(path)
    assert state is not None
    assert state["step"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["state.pt"]
    torch.save({"code": pytest.raises}, path)
    with pytest.raises(Exception, match="weights_only"):
        stage.load(path)
