"""Which denoisers of the Compose file claim a GPU each, and where."""

from __future__ import annotations

import yaml

from giornata_denoiser.config import DenoiserConfig
from tests.unit.deploy.test_compose import DEPLOY, SECOND


def test_denoisers_of_a_model_claim_a_gpu_each_in_memory_that_they_share() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for variant in ("denoiser", "denoiser-gpu"):
        service = compose["services"][variant]
        folder = service["environment"]["GIORNATA_DEVICE_CLAIMS"]
        config = DenoiserConfig.model_validate({"model": "m", "device_claims": folder})
        assert config.gpus_wanted == 1
        assert f"devices:{folder}" in service["volumes"]
    assert compose["volumes"]["devices"]["driver_opts"]["type"] == "tmpfs", (
        "NFS would lock for other hosts, too"
    )
    for variant in SECOND:
        assert "GIORNATA_DEVICE_CLAIMS" not in compose["services"][variant]["environment"], (
            "it shares SECOND_GPU with its prepost, and with whoever is there"
        )


def test_services_on_gpus_state_what_they_need_where_all_see_it() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    computing = [name for name in services if name.startswith(("denoiser", "prepost", "controlnet"))]
    on_gpus = [name for name in computing if name.endswith("-gpu")]
    assert len(on_gpus) == 5
    for name in computing:
        folder = services[name]["environment"].get("GIORNATA_DEVICE_LEDGER")
        assert folder == ("/devices" if name in on_gpus else None)
        assert folder is None or f"devices:{folder}" in services[name]["volumes"]


def test_what_triton_compiles_on_gpus_outlives_the_container_and_is_its_users() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("denoiser-gpu", "denoiser-second-gpu", "controlnet-gpu"):
        folder = compose["services"][name]["environment"]["TRITON_CACHE_DIR"]
        [volume] = [mount for mount in compose["services"][name]["volumes"] if mount.endswith(f":{folder}")]
        assert volume.partition(":")[0] in compose["volumes"]
        assert f" {folder} " in (DEPLOY / "Dockerfile").read_text(), "the image's folder owns the volume"
