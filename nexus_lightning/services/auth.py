"""Who calls and how much they may: tokens, roles, rates, and what a server allows one account.

A token reads ``nxl_<token_id>_<secret>``: the id finds it, the secret (192 random bits, so a plain sha256 is enough)
proves it. The secret is shown once, when the token is made; at rest there is its digest, compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nexus_lightning.services.errors import Conflict, Forbidden, NotFound, RateLimited, Unauthorized
from nexus_lightning.services.store import Store

ROLES = ("tenant", "operator")
_TOKEN = re.compile(r"nxl_([0-9a-f]{12})_([0-9a-f]{48})")
_NOBODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Account:
    """The owner behind a token.

    Attributes:
        owner_id: owns tenants and sessions; one owner may have several tokens.
        name: for people.
        role: tenant | operator. An operator also lists and describes what others own, pauses, resumes and cancels their
            workloads and deletes their tenants (the audit log tells); it does not train them or read their weights.
    """

    owner_id: str
    name: str
    role: str
    token_id: str

    @property
    def operator(self) -> bool:
        return self.role == "operator"


class Accounts:
    """Tokens of a store, held in memory: a check costs one hash and no disk access. Thread-safe.

    Args:
        store: keeps them.
        requests_per_s: what each owner may send, all its tokens together (see :class:`TokenBucket`).
        clock: seconds, monotonic; tests give their own.

    Example:
        >>> import tempfile, pathlib
        >>> accounts = Accounts(Store(pathlib.Path(tempfile.mkdtemp())), requests_per_s=100.0)
        >>> accounts.authenticate("Bearer " + accounts.create("alice", "tenant")).name
        'alice'
    """

    def __init__(self, store: Store, requests_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rate = requests_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, TokenBucket] = {}
        self._accounts: dict[str, tuple[str, Account]] = {}
        for row in store.tokens():
            if row["revoked_s"] is None:
                account = Account(row["owner_id"], row["name"], row["role"], row["token_id"])
                self._accounts[row["token_id"]] = (row["digest"], account)

    def create(self, name: str, role: str) -> str:
        """A token for the owner ``name``, who is made when unknown; the only time that the secret is seen.

        Raises:
            Conflict: ``name`` exists with another role.
        """
        assert role in ROLES
        token_id, secret = secrets.token_hex(6), secrets.token_hex(24)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        with self._lock:
            owner = next((owner for owner in self._store.owners() if owner["name"] == name), None)
            if owner is None:
                owner = {"owner_id": "o" + secrets.token_hex(16), "role": role}
                self._store.add_owner(owner["owner_id"], name, role)
            elif owner["role"] != role:
                raise Conflict(f"owner {name!r} has role {owner['role']}, not {role}: choose another name")
            self._store.add_token(token_id, owner["owner_id"], digest)
            self._accounts[token_id] = (digest, Account(owner["owner_id"], name, role, token_id))
        return f"nxl_{token_id}_{secret}"

    def revoke(self, token_id: str) -> None:
        """Refused from the next request on; the last operator token cannot be revoked.

        Raises:
            NotFound, Conflict.
        """
        with self._lock:
            entry = self._accounts.get(token_id)
            if entry is None:
                raise NotFound(f"token {token_id!r}: unknown")
            others = [a for _, a in self._accounts.values() if a.operator and a.token_id != token_id]
            if entry[1].operator and not others:
                raise Conflict(f"token {token_id}: the only operator token; make another one first")
            self._store.revoke_token(token_id)
            del self._accounts[token_id]

    def authenticate(self, authorization: str | None) -> Account:
        """The account of an ``Authorization`` header.

        Raises:
            Unauthorized: missing, malformed, unknown, wrong or revoked: one message for all of them.
        """
        found = _TOKEN.fullmatch((authorization or "").removeprefix("Bearer "))
        token_id, secret = found.groups() if found else ("", "")
        digest, account = self._accounts.get(token_id, (_NOBODY, None))
        given = hashlib.sha256(secret.encode()).hexdigest()
        if not hmac.compare_digest(digest, given) or account is None:
            raise Unauthorized("no valid token: send the header `Authorization: Bearer nxl_<id>_<secret>`")
        return account

    def admit(self, account: Account) -> None:
        """Count one request of this account.

        Raises:
            RateLimited: with the time until the next one is admitted.
        """
        with self._lock:
            bucket = self._buckets.get(account.owner_id)
            if bucket is None:
                bucket = self._buckets[account.owner_id] = TokenBucket(self._rate, self._clock())
            wait_s = bucket.take(self._clock())
        if wait_s > 0:
            raise RateLimited(f"more than {self._rate:g} requests a second", retry_after_s=round(wait_s, 3))


def require_operator(account: Account) -> None:
    """Raises :class:`Forbidden` for the role ``tenant``."""
    if not account.operator:
        raise Forbidden("this needs an operator token")


class TokenBucket:
    """``rate`` requests a second on average, and as many at once as two seconds bring.

    Example:
        >>> bucket = TokenBucket(rate=1.0, now=0.0)
        >>> [bucket.take(0.0), bucket.take(0.0), bucket.take(0.5), bucket.take(1.0)]
        [0.0, 0.0, 0.5, 0.0]
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.size = rate, max(1.0, 2 * rate)
        self.left, self.at = self.size, now

    def take(self, now: float) -> float:
        """0.0 when admitted, else seconds until it would be."""
        self.left = min(self.size, self.left + (now - self.at) * self.rate)
        self.at = now
        if self.left >= 1:
            self.left -= 1
            return 0.0
        return (1 - self.left) / self.rate
