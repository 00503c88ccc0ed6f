"""What the launcher starts, as plain values, and what it hands on of the model that ships."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from giornata.api_keys import KeysFile, NatsUser, render, with_key
from giornata.config import ServiceConfig, load
from giornata.families import Family
from giornata.model_cards import digest
from giornata.nats_users import USERS_CONF
from giornata.wire.loras import LoraCounters
from giornata.wire.subjects import NatsRole, has_anonymous
from giornata.wire.workers import ServiceName, ServiceState
from giornata_lab.demo.demo import DemoOptions
from giornata_lab.demo.demo import plan as demo_plan
from giornata_lab.model.adapters import lessons
from giornata_prepost.config import PrepostConfig
from giornata_tools.checkout import SEGMENTER, STATE, TRAINED
from giornata_tools.cli.system import up
from giornata_tools.launcher import models
from giornata_tools.launcher.models import (
    DOWNLOAD_S,
    LORAS,
    MASKS,
    NETS,
    REFINER,
    StackModel,
    builder_digest,
    choose,
    choose_all,
    publish,
    shared_loras,
    shipped_masks,
    with_controlnets,
)
from giornata_tools.launcher.plan import (
    DRAIN_ORDER,
    KEPT_PORTS,
    MAX_RESTART_DELAY_S,
    EmbeddedNats,
    GatewayPorts,
    NatsServer,
    StackPlan,
    check_port,
    environment,
    model_environment,
    nats_config,
    restart_delay_s,
    service_command,
    valkey_config,
)
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import Stack, running
from giornata_tools.launcher.up import UpOptions, addresses, connection, plan, profiled
from giornata_tools.launcher.warden import remaining
from tests.fakes.fleet import state_of
from tests.fakes.key_files import CREATED
from tests.fakes.profiles import PROFILE
from tests.patience import HUNG_S

PLAN = StackPlan(
    state=Path("state"),
    logs=Path("logs"),
    models=(StackModel("/models/fill", "fill"),),
    torch_threads=1,
    drain_s=3.5,
)
NATS_URL, REDIS_URL = "nats://user:secret@host:4222", "unix:///tmp/v.sock"


def surroundings(
    base: Mapping[str, str], plan: StackPlan = PLAN, password_file: Path | None = None
) -> dict[str, str]:
    return environment(base, plan, NATS_URL, REDIS_URL, password_file)


def test_a_service_is_a_module_with_its_instance_name() -> None:
    command = service_command(ServiceName.LORA_STORE, "lora-store-1", {}, "--x", "y")
    assert command.argv == (
        sys.executable,
        "-m",
        "giornata_lora_store",
        "--instance",
        "lora-store-1",
        "--x",
        "y",
    )
    assert command.name == "lora-store-1"


def test_a_service_reads_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in surroundings({}).items():
        monkeypatch.setenv(name, value)
    config = load(ServiceConfig, "router", ["--instance", "router-1"])
    assert (config.nats_url, config.blobs_url) == (NATS_URL, REDIS_URL)
    assert (config.instance, config.drain_s) == ("router-1", 3.5)


def test_services_state_what_they_need_of_gpus_in_the_stack_s_own_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = surroundings({})["GIORNATA_DEVICE_LEDGER"]
    assert told == str(PLAN.state / "devices")
    monkeypatch.setenv("GIORNATA_DEVICE_LEDGER", told)
    assert load(PrepostConfig, "prepost", ["--model", "m"]).device_ledger == PLAN.state / "devices"
    assert (
        surroundings({"GIORNATA_DEVICE_LEDGER": "/of/the/host"})["GIORNATA_DEVICE_LEDGER"] == "/of/the/host"
    )


def test_addresses_are_no_flags_because_they_may_hold_passwords() -> None:
    env = surroundings({"PATH": "/bin", "OMP_NUM_THREADS": "16"})
    argv = service_command(ServiceName.DENOISER, "denoiser-1", env).argv
    assert not any("secret" in word for word in argv)
    assert env["PATH"] == "/bin"
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1", "the plan's torch threads"


def test_a_model_is_told_with_its_name_or_without_one() -> None:
    assert model_environment(StackModel("/models/fill")) == {"GIORNATA_MODEL": "/models/fill"}
    assert model_environment(StackModel("/m", "fill", env={"GIORNATA_PROFILE": "p"})) == {
        "GIORNATA_MODEL": "/m",
        "GIORNATA_MODEL_NAME": "fill",
        "GIORNATA_PROFILE": "p",
    }


def test_each_model_has_denoisers_and_preposts_and_nothing_else() -> None:
    models = StackModel("/m/fill"), StackModel("/m/sd")
    two = replace(PLAN, models=models)
    assert two.models_of(ServiceName.DENOISER) == two.models_of(ServiceName.PREPOST) == models
    assert two.models_of(ServiceName.ROUTER) == two.models_of(ServiceName.GATEWAY) == (None,)


async def test_several_models_are_named_by_folder_or_by_a_name_before_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "a=b"
    one.mkdir()
    two.mkdir()
    told: list[str] = []
    asked = [str(one), f"second={two}", "third=some/model"]
    models = await choose_all(asked, {"GIORNATA_MODEL": "./unread"}, None, tmp_path, told.append)
    assert [(each.source, each.served_name) for each in models] == [
        (str(one), "one"),
        (str(two), "second"),
        ("some/model", "third"),
    ]
    assert len(told) == 1, "a download, of the one that is no folder"
    assert plan(up_options(), models).ready_s == DOWNLOAD_S
    [alone] = await choose_all([str(one)], {"GIORNATA_MODEL_NAME": "mine"}, None, tmp_path, told.append)
    assert alone.served_name == "mine"


@pytest.mark.parametrize(
    ("asked", "env", "told"),
    [
        (["x=./missing"], {}, "--model names the folder ./missing, which does not exist"),
        (["a/one", "b/one"], {}, "Several models have the name one; .*NAME=FOLDER"),
        (["a/one", "b/two"], {"GIORNATA_MODEL_NAME": "mine"}, "is mine, one name, and 2 models"),
    ],
)
async def test_models_that_cannot_be_told_apart_are_refused(
    asked: list[str], env: dict[str, str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=told):
        await choose_all(asked, env, None, tmp_path, lambda _: None)


def test_a_gateway_says_where_it_listens() -> None:
    flags = GatewayPorts("127.0.0.1", 0, Path("/logs")).flags("gateway-1")
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    assert int(told.pop("--port")) in KEPT_PORTS, "its successor finds it free"
    assert told == {"--host": "127.0.0.1", "--port-file": "/logs/gateway-1.port"}


def test_server_files_hold_what_durability_needs() -> None:
    nats = nats_config(NatsServer("nats-server", Path("/s"), Path("/users")))
    assert 'listen: "127.0.0.1:-1"' in nats
    assert "max_payload: 8MB" in nats
    assert 'store_dir: "/s"' in nats
    assert 'include "../users/server/users.conf"' in nats
    valkey = valkey_config(Path("/s"), Path("/v.sock")).splitlines()
    assert {
        "port 0",
        "appendonly yes",
        "appendfsync no",
        "maxmemory-policy noeviction",
        'unixsocket "/v.sock"',
        "set-proc-title no",
    } <= set(valkey)


def test_known_applications_may_log_in_at_every_start(tmp_path: Path) -> None:
    user = NatsUser(name="shop", bcrypt="$2b$04$" + "a" * 53)
    keys = tmp_path / "keys.json"
    keys.write_text(render(with_key(KeysFile(), "key", "alice", CREATED, user)))
    for _ in range(2):
        config = (EmbeddedNats(tmp_path, 1, keys).users / USERS_CONF).read_text()
        assert (user.bcrypt in config, has_anonymous(config)) == (True, True)
    assert user.bcrypt not in (EmbeddedNats(tmp_path, 1).users / USERS_CONF).read_text()
    keys.write_text("{")
    with pytest.raises(LaunchError, match=r"keys\.json is not a file of API keys"):
        EmbeddedNats(tmp_path, 1, keys)


def test_whoever_asks_is_drained_before_whoever_answers() -> None:
    order = [service for tier in DRAIN_ORDER for service in tier]
    assert sorted(order) == sorted(ServiceName)
    assert order[:2] == [ServiceName.GATEWAY, ServiceName.ROUTER]


def test_restarts_slow_down_and_start_over_after_a_steady_run() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(restart_delay_s(delays[-1], ran_s=0.1))
    assert delays[1:4] == [0.5, 1.0, 2.0]
    assert delays[-1] == MAX_RESTART_DELAY_S
    assert restart_delay_s(delays[-1], ran_s=3600) == 0.5


def test_the_warden_remembers_groups_that_were_not_forgotten() -> None:
    lines = ["+10\n", "+11\n", "-10\n", "+12\n", "+10\n", "-12\n"]
    assert remaining(lines) == {10, 11}


def test_another_builder_is_another_checkpoint(tmp_path: Path) -> None:
    builder = tmp_path / "build.py"
    builder.write_text("a")
    one = builder_digest(builder)
    assert builder_digest(builder) == one
    builder.write_text("b")
    assert builder_digest(builder) != one


async def test_without_the_lab_no_random_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    with pytest.raises(LaunchError, match="giornata-lab, which is not installed"):
        await choose({}, Family.SD, tmp_path, print)


def test_up_plans_what_flags_and_environment_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIORNATA_NATS_URL", "nats://elsewhere")
    monkeypatch.delenv("GIORNATA_BLOBS_URL", raising=False)
    options = up_options("--denoisers", "2", "--routers", "3", "--port", "0", "--family", "flux-inpaint")
    assert options.family is Family.FLUX_INPAINT
    planned = plan(options, (StackModel("/m", "tiny"),))
    assert planned.nats_url == "nats://elsewhere"
    assert planned.blobs_url is None
    assert planned.replicas[ServiceName.DENOISER] == 2
    assert planned.replicas[ServiceName.ROUTER] == 3
    assert planned.replicas[ServiceName.LORA_STORE] == 1


def test_a_cluster_is_started_or_named_but_not_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIORNATA_NATS_URL", raising=False)
    assert plan(up_options(), (StackModel("/m", "tiny"),)).nats_servers == 1
    assert plan(up_options("--nats-servers", "3"), (StackModel("/m", "tiny"),)).nats_servers == 3
    monkeypatch.setenv("GIORNATA_NATS_URL", "nats://elsewhere")
    with pytest.raises(LaunchError, match="GIORNATA_REPLICAS=3"):
        plan(up_options("--nats-servers", "3"), (StackModel("/m", "tiny"),))


def test_services_of_a_cluster_keep_everything_three_times() -> None:
    guarded = surroundings({}, replace(PLAN, nats_servers=3), Path("/users/router/password"))
    assert guarded["GIORNATA_REPLICAS"] == "3"
    assert guarded["GIORNATA_NATS_PASSWORD_FILE"] == "/users/router/password"  # noqa: S105 - its place
    assert {"GIORNATA_REPLICAS", "GIORNATA_NATS_PASSWORD_FILE"}.isdisjoint(surroundings({}))


def up_options(*argv: str) -> UpOptions:
    return UpOptions(**up.make_context("up", list(argv)).params)


def test_denoisers_of_several_devices_are_told_which() -> None:
    several = plan(up_options("--devices", "cpu,cpu"), (StackModel("/m", "tiny"),))
    assert several.env_of[ServiceName.DENOISER] == {"GIORNATA_DEVICES": "cpu,cpu"}
    assert plan(up_options(), (StackModel("/m", "tiny"),)).env_of[ServiceName.DENOISER] == {}


def test_aliases_reach_the_gateway_beside_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIORNATA_MODEL_ALIASES", "dall-e-2=tiny")
    asked = plan(
        up_options("--alias", "gpt-image-1=tiny", "--alias", "gpt-image-2=tiny"), (StackModel("/m", "tiny"),)
    )
    told = asked.env_of[ServiceName.GATEWAY]
    assert told == {"GIORNATA_MODEL_ALIASES": "dall-e-2=tiny,gpt-image-1=tiny,gpt-image-2=tiny"}
    assert plan(up_options(), (StackModel("/m", "tiny"),)).env_of[ServiceName.GATEWAY] == {}
    with pytest.raises(LaunchError, match="--alias gpt-image-1=tiyn leads to no model"):
        plan(up_options("--alias", "gpt-image-1=tiyn"), (StackModel("/m", "tiny"),))


def test_the_users_environment_is_not_overruled_by_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DRAIN_S": "45", "HOST": "0.0.0.0", "PORT": "9000", "NATS_URL": ""}.items():  # noqa: S104
        monkeypatch.setenv(f"GIORNATA_{name}", value)
    planned = plan(up_options(), (StackModel("/m", "tiny"),))
    assert (planned.drain_s, planned.host, planned.port) == (45, "0.0.0.0", 9000)  # noqa: S104
    assert planned.nats_url is None, "empty is as good as unset"
    assert plan(up_options("--port", "1"), (StackModel("/m", "tiny"),)).port == 1, "a flag wins"


def test_every_mistake_of_the_environment_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIORNATA_DRAIN_S", "long")
    monkeypatch.setenv("GIORNATA_REPLICAS", "2")
    with pytest.raises(SystemExit, match="2"):
        plan(up_options(), (StackModel("/m", "tiny"),))
    told = capsys.readouterr().err
    assert "GIORNATA_DRAIN_S" in told
    assert "GIORNATA_REPLICAS" in told


async def test_a_named_model_may_take_the_time_of_a_download(tmp_path: Path) -> None:
    told: list[str] = []
    hub = await choose({"GIORNATA_MODEL": "somebody/some-model"}, Family.FLUX_FILL, tmp_path, told.append)
    assert (hub.source, hub.name, hub.ready_s) == ("somebody/some-model", None, DOWNLOAD_S)
    assert "download" in told[0]
    assert plan(up_options(), (hub,)).ready_s == DOWNLOAD_S
    named = {"GIORNATA_MODEL": str(tmp_path), "GIORNATA_MODEL_NAME": "mine"}
    assert await choose(named, Family.FLUX_FILL, tmp_path, told.append) == StackModel(
        str(tmp_path), "mine", DOWNLOAD_S
    )
    assert len(told) == 1, "a folder needs no download"
    with pytest.raises(LaunchError, match="does not exist"):
        await choose({"GIORNATA_MODEL": "./missing"}, Family.FLUX_FILL, tmp_path, told.append)


def test_of_two_builds_at_a_time_the_first_stays(tmp_path: Path) -> None:
    first, second, folder = (tmp_path / name for name in ("first", "second", "model"))
    for build in (first, second):
        build.mkdir()
        (build / "made by").write_text(build.name)
        publish(build, folder)
    assert (folder / "made by").read_text() == "first"
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "nothing", tmp_path / "other")


def test_controlnet_services_are_started_when_they_are_asked_for_and_have_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = (StackModel("/m", "tiny"),)
    monkeypatch.delenv("GIORNATA_CONTROLNETS", raising=False)
    assert plan(up_options(), models).replicas[ServiceName.CONTROLNET] == 0
    assert StackPlan(Path("state"), Path("logs"), models).replicas[ServiceName.CONTROLNET] == 0
    with pytest.raises(LaunchError, match="--controlnet-services 2 needs GIORNATA_CONTROLNETS"):
        plan(up_options("--controlnet-services", "2"), models)
    monkeypatch.setenv("GIORNATA_CONTROLNETS", "/nets/edges")
    assert plan(up_options("--controlnet-services", "2"), models).replicas[ServiceName.CONTROLNET] == 2


# What `giornata up` looks at before it starts, and what it waits for before it says that it is ready.


class Ready(Stack):
    """A stack whose gateway has told its address."""

    @property
    def urls(self) -> list[str]:
        return ["http://127.0.0.1:4711"]


def stack(state: Path = STATE) -> Stack:
    made = Ready(
        StackPlan(state, state / "logs", (StackModel("/m", "tiny"),)),
        cast("Any", None),
        cast("Any", None),
        print,
    )
    made.nats_url, made.blobs_url = "nats://127.0.0.1:4712", "unix:///v"
    return made


def told(validating: int, instance: str = "lora-store-1") -> ServiceState:
    counters = LoraCounters(stored_bytes=0, limit_bytes=1, validating=validating)
    return state_of(ServiceName.LORA_STORE, instance, loras=counters)


def test_a_taken_port_is_refused_in_words_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"^Port {port} of 127\.0\.0\.1 is taken .* --port 0\.$"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)


def test_a_port_that_nothing_can_listen_on_is_refused_with_the_reason() -> None:
    with pytest.raises(LaunchError, match="no place to listen"):
        check_port("203.0.113.1", 8000)


async def test_a_taken_port_ends_the_start_before_any_server_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plan = StackPlan(
            tmp_path / "s", tmp_path / "l", (StackModel("/m", "tiny"),), port=taken.getsockname()[1]
        )
        with pytest.raises(LaunchError, match="is taken"):
            async with running(plan):
                pass
    assert not (tmp_path / "s" / "nats").exists()


async def test_it_waits_for_loras_that_are_being_checked() -> None:
    made = stack()
    made.watch.hear(told(2))
    waiting = asyncio.ensure_future(made.unchecked_loras(HUNG_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.watch.hear(told(0, "lora-store-2"))
    await asyncio.sleep(0)
    assert not waiting.done(), "another store still checks"
    made.watch.hear(told(0))
    assert await waiting == 0


async def test_loras_that_take_longer_are_counted() -> None:
    made = stack()
    made.watch.hear(told(2))
    assert await made.unchecked_loras(0) == 2
    assert "LoRAs still being checked: 2." in addresses(made, 2)
    assert "checked" not in addresses(made)


def test_what_it_says_names_the_state_folder_where_commands_need_it(tmp_path: Path) -> None:
    assert "--state" not in addresses(stack())
    assert f"--state {tmp_path}" in addresses(stack(tmp_path))


def test_the_connection_names_password_files_of_embedded_servers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stack()
    assert connection(made).password_files == {}
    monkeypatch.setattr(made, "nats_password_file", lambda user: tmp_path / user)
    found = connection(made)
    assert (found.url, found.nats_url, found.blobs_url) == (made.url, made.nats_url, made.blobs_url)
    assert found.password_file(NatsRole.OBSERVER) == tmp_path / "observer"
    assert found.password_file(NatsRole.APPLICATION) is None


# `giornata up` hands on what ships with the trained model, where nobody names others, and its folder's
# profile.


OURS, OTHER = StackModel(str(TRAINED)), StackModel("a/hub-id")


def test_the_trained_model_is_served_with_the_controlnets_that_ship() -> None:
    kept = replace(OURS, env={"GIORNATA_PROFILE": "p"})
    ours, other = with_controlnets((kept, OTHER), {})
    (folder,) = map(Path, ours.env[NETS].split(","))
    assert folder == lessons.read_card("outline").file.parent
    assert ours.env["GIORNATA_PROFILE"] == "p"
    assert other == OTHER


def test_the_folder_of_shared_loras_is_that_of_the_trained_model() -> None:
    folder = Path(shared_loras((OTHER, OURS), {})[LORAS])
    assert folder / TRAINED.name / "swapped.safetensors" == lessons.read_card("swapped").file


@pytest.mark.parametrize("model", [OTHER, replace(OURS, name="mine")], ids=["another", "renamed"])
def test_loras_are_for_models_by_name(model: StackModel) -> None:
    assert shared_loras((model,), {}) == {}


@pytest.mark.parametrize("named", ["", "/adapters"])
def test_what_the_environment_names_is_left_to_it(named: str) -> None:
    assert with_controlnets((OURS,), {NETS: named}) == (OURS,)
    assert shared_loras((OURS,), {LORAS: named}) == {}


def test_up_tells_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NETS, LORAS):
        monkeypatch.delenv(name, raising=False)
    asked = plan(UpOptions(**up.make_context("up", []).params), (OURS,))
    assert asked.models[0].env[NETS]
    assert asked.env_of[ServiceName.LORA_STORE][LORAS]


# Masks from words, where the model that ships is served and nobody says what makes them.


SHIPPED = {MASKS: str(SEGMENTER)}


@pytest.mark.parametrize("models", [(OURS,), (replace(OURS, name="mine"),), (OURS, replace(OURS, name="b"))])
def test_the_trained_model_is_served_with_the_segmenter_that_ships(models: tuple[StackModel, ...]) -> None:
    assert shipped_masks(models, {REFINER: ""}) == SHIPPED


@pytest.mark.parametrize("models", [(OTHER,), (OURS, OTHER)], ids=["another", "beside another"])
def test_nothing_is_said_of_another_models_pictures(models: tuple[StackModel, ...]) -> None:
    assert shipped_masks(models, {}) == {}


@pytest.mark.parametrize("said", [{MASKS: ""}, {MASKS: "a/segmenter"}, {REFINER: "a/refiner"}])
def test_what_the_environment_says_is_left_to_it(said: dict[str, str]) -> None:
    assert shipped_masks((OURS,), said) == {}


def planned_up(model: StackModel, _: Path) -> StackPlan:
    return plan(UpOptions(**up.make_context("up", []).params), (model,))


def planned_demo(model: StackModel, folder: Path) -> StackPlan:
    return demo_plan(DemoOptions(None, 1, folder, steps=1, seed=0, no_oracle=True), model, folder)


@pytest.mark.parametrize("planned", [planned_up, planned_demo])
def test_up_and_demo_tell_prepost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: object) -> None:
    assert callable(planned)
    for name in (MASKS, REFINER):
        monkeypatch.delenv(name, raising=False)
    assert planned(OURS, tmp_path).env_of[ServiceName.PREPOST] == SHIPPED
    assert planned(OTHER, tmp_path).env_of[ServiceName.PREPOST] == {}
    monkeypatch.setenv(MASKS, "")
    assert planned(OURS, tmp_path).env_of[ServiceName.PREPOST] == {}


# The profile that lies in its folder, if it is of what it starts.


CHOSEN = StackModel(str(TRAINED))
FITTING = {"model_digest": digest(TRAINED), "device": "a processor, threads: 2"}


@pytest.mark.parametrize("device", ["a processor, threads: 2", "a GPU"])
def test_a_profile_of_the_model_is_handed_on(tmp_path: Path, device: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_copy(update={**FITTING, "device": device}).model_dump_json())
    assert profiled(path, (CHOSEN,), 2, {}) == (replace(CHOSEN, env={"GIORNATA_PROFILE": str(path)}),)


@pytest.mark.parametrize(
    ("content", "env"),
    [
        (None, {}),
        ("{}", {}),
        ("[", {}),
        (PROFILE.model_copy(update={**FITTING, "model_digest": "another"}).model_dump_json(), {}),
        (PROFILE.model_copy(update={**FITTING, "device": "a processor, threads: 4"}).model_dump_json(), {}),
        (PROFILE.model_copy(update=FITTING).model_dump_json(), {"GIORNATA_PROFILE": "other.json"}),
    ],
    ids=["missing", "empty", "broken", "another model", "other threads", "one is named"],
)
def test_any_other_is_not(tmp_path: Path, content: str | None, env: dict[str, str]) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    hub = StackModel("a/hub-id")
    assert profiled(path, (CHOSEN,), 2, env) == (CHOSEN,)
    assert profiled(path, (hub,), 2, {}) == (hub,)


def test_of_several_models_each_gets_its_own_profile_or_none(tmp_path: Path) -> None:
    path, hub = tmp_path / "profile.json", StackModel("a/hub-id")
    path.write_text(PROFILE.model_copy(update=FITTING).model_dump_json())
    ours = replace(CHOSEN, env={"GIORNATA_PROFILE": str(path)})
    assert profiled(path, (CHOSEN, hub), 2, {}) == (ours, hub)
    named = {"GIORNATA_PROFILE": str(path)}
    unset = replace(hub, env={"GIORNATA_PROFILE": ""})
    assert profiled(tmp_path / "other.json", (CHOSEN, hub), 2, named) == (ours, unset)
    with pytest.raises(LaunchError, match="is of none of the models"):
        profiled(path, (hub, hub), 2, named)
