"""Who asks: keys by their hashes, limits of tenants, pages of other sites, addresses that others reach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.api_keys import KeysFile, TenantLimits
from giornata.wire.errors import CrossSite, Unauthorized
from giornata_gateway.intake.rules.tenants import Tenant, bearer, check_site, is_loopback, tenant_of
from tests.fakes.key_files import keys_of

DEFAULTS = Tenant("default", in_progress=8, per_minute=0)


def test_tenants_by_key() -> None:
    file = keys_of({"sk-alice-123": "alice", "sk-robert-12": "bob", "sk-alice-456": "alice"})
    assert tenant_of("sk-robert-12", file, DEFAULTS).name == "bob"
    assert {tenant_of(key, file, DEFAULTS).name for key in ("sk-alice-123", "sk-alice-456")} == {"alice"}
    hashes = [key.sha256 for key in file.keys]
    for key in (None, "sk-robert-1", "", "ключ", "sk-\udcff", *hashes):
        with pytest.raises(Unauthorized):
            tenant_of(key, file, DEFAULTS)


def test_a_file_without_keys_is_closed_and_no_file_is_open() -> None:
    for key in (None, "anything"):
        with pytest.raises(Unauthorized):
            tenant_of(key, KeysFile(), DEFAULTS)
        assert tenant_of(key, None, DEFAULTS) == DEFAULTS


@given(
    st.builds(
        TenantLimits,
        in_progress=st.none() | st.integers(0, 9),
        per_minute=st.none() | st.integers(0, 9),
        weight=st.none() | st.floats(0.1, 9),
    )
)
def test_a_tenants_own_limits_go_before_the_gateways(limits: TenantLimits) -> None:
    file = keys_of({"key": "alice"}, {"alice": limits, "bob": TenantLimits(in_progress=1, weight=9)})
    tenant = tenant_of("key", file, DEFAULTS)
    assert tenant.in_progress == (8 if limits.in_progress is None else limits.in_progress)
    assert tenant.per_minute == (0 if limits.per_minute is None else limits.per_minute)
    assert tenant.weight == (1.0 if limits.weight is None else limits.weight)


def test_bearer_tokens() -> None:
    assert bearer("bearer  abc ") == "abc"
    assert bearer("Basic abc") is None
    assert bearer(None) is None


def test_pages_of_other_sites_are_refused_unless_a_key_is_asked_for() -> None:
    with pytest.raises(CrossSite, match="cross-site"):
        check_site("cross-site", keyed=False)
    check_site("cross-site", keyed=True)
    for site in (None, "", "none", "same-origin", "same-site"):
        check_site(site, keyed=False)


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True),
        ("", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False), ("0", False),
    ],
)  # fmt: skip
def test_addresses_that_only_this_machine_reaches(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone
