"""Tokens, roles, rates."""

from __future__ import annotations

import pytest

from nexus_lightning.services.auth import Accounts, require_operator
from nexus_lightning.services.errors import Conflict, Forbidden, NotFound, RateLimited, Unauthorized
from nexus_lightning.services.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def test_a_token_works_until_it_is_revoked_and_its_secret_is_nowhere(store, tmp_path):
    accounts = Accounts(store, 100.0)
    token = accounts.create("alice", "tenant")
    other = accounts.create("alice", "tenant")
    account = accounts.authenticate(f"Bearer {token}")
    assert (account.name, account.role) == ("alice", "tenant")
    assert accounts.authenticate(f"Bearer {other}").owner_id == account.owner_id, "two tokens of one owner"
    secret = token.split("_")[2].encode()
    assert not any(secret in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    again = Accounts(store, 100.0)
    assert again.authenticate(f"Bearer {token}") == account, "after a restart"
    accounts.revoke(account.token_id)
    for one in (accounts, Accounts(store, 100.0)):
        with pytest.raises(Unauthorized):
            one.authenticate(f"Bearer {token}")
        one.authenticate(f"Bearer {other}")
    with pytest.raises(NotFound):
        accounts.revoke(account.token_id)


def test_every_wrong_token_gets_the_same_answer(store):
    accounts = Accounts(store, 100.0)
    token = accounts.create("alice", "tenant")
    prefix, token_id, secret = token.split("_")
    wrong = [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {token}",
        f"bearer{token}",
        f"Bearer {token} ",
        f"Bearer {token}\n",
        f"Bearer {prefix}_{token_id}_{'0' * 48}",
        f"Bearer {prefix}_{'0' * 12}_{secret}",
        f"Bearer {prefix}_{token_id}_{secret[:-1]}",
        f"Bearer {prefix}_{token_id}_",
        "Bearer nxl__",
        "Bearer \ud800",
        "Bearer " + "x" * 10_000,
    ]
    said = set()
    for header in wrong:
        with pytest.raises(Unauthorized) as refused:
            accounts.authenticate(header)
        said.add(str(refused.value))
    assert len(said) == 1


def test_roles(store):
    accounts = Accounts(store, 100.0)
    operator = accounts.authenticate("Bearer " + accounts.create("root", "operator"))
    alice = accounts.authenticate("Bearer " + accounts.create("alice", "tenant"))
    require_operator(operator)
    with pytest.raises(Forbidden):
        require_operator(alice)
    with pytest.raises(Conflict, match="role tenant"):
        accounts.create("alice", "operator")
    with pytest.raises(Conflict, match="only operator token"):
        accounts.revoke(operator.token_id)


def test_rates_are_counted_per_owner_and_recover(store):
    now = [0.0]
    accounts = Accounts(store, 5.0, clock=lambda: now[0])
    one, two = (accounts.authenticate("Bearer " + accounts.create("alice", "tenant")) for _ in range(2))
    bob = accounts.authenticate("Bearer " + accounts.create("bob", "tenant"))
    for account in (one, two) * 5:
        accounts.admit(account)
    with pytest.raises(RateLimited) as refused:
        accounts.admit(one)
    assert refused.value.retryable and refused.value.retry_after_s == pytest.approx(0.2)
    accounts.admit(bob)
    now[0] += refused.value.retry_after_s
    accounts.admit(two)
    with pytest.raises(RateLimited):
        accounts.admit(one)
