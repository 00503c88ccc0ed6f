"""The parts of training that have an oracle; tests/lab/model/test_shipped_training.py runs the whole recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxFillPipeline

from giornata_lab.model import fill
from giornata_lab.model.train.run import Muon, load_state, orthogonalise, save_state


def test_tokens_lie_as_in_the_pipeline() -> None:
    z = torch.randn(2, fill.LATENT_CHANNELS, 12, 12)
    tokens = fill.pack(z)
    torch.testing.assert_close(
        tokens, FluxFillPipeline._pack_latents(z, 2, z.shape[1], 12, 12), rtol=0, atol=0
    )
    ids = FluxFillPipeline._prepare_latent_image_ids(1, 6, 6, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(fill.positions(6), ids, rtol=0, atol=0)
    moved = fill.positions(6, 3, 5) - fill.positions(6)
    assert (moved == torch.tensor([0, 3, 5])).all()


def test_a_masks_pixels_stay_in_their_token() -> None:
    mask = torch.zeros(1, 48, 48)
    mask[0, 17, 42] = 1
    tokens = fill.pack_mask(mask)
    assert tokens.shape == (1, 36, 64)
    assert tokens[0].any(-1).nonzero().flatten().tolist() == [2 * 6 + 5]


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


def test_a_state_is_written_whole_and_read_without_unpickling(tmp_path: Path) -> None:
    path = tmp_path / "run" / "state.pt"
    assert load_state(path) is None
    save_state(path, {"step": 3, "weights": {"a": torch.ones(2)}})
    state = load_state(path)
    assert state is not None
    assert state["step"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["state.pt"]
    torch.save({"code": pytest.raises}, path)
    with pytest.raises(Exception, match="weights_only"):
        load_state(path)
