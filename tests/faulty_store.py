"""Any store, with faults that a test sets while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_s3.limit import Limit
from dcp_s3.store import Store
from dcp_s3.stores.wrapper import StoreWrapper

Rule = Callable[[str, str], Exception | None]
_METHODS = ("read", "get", "put", "put_stream", "head", "exists", "page", "delete", "uploads", "abort")


class FaultyStore(StoreWrapper):
    """`rule` is asked before each call of ``store`` (with the method's name, and the key or prefix), and again after it
    (the method's name with ``after ``); an exception that it returns is raised."""

    def __init__(self, store: Store, rule: Rule = lambda method, key: None) -> None:
        super().__init__(store)
        self.rule = rule

    def within(self, limit: Limit) -> FaultyStore:
        return FaultyStore(self.store.within(limit), lambda method, key: self.rule(method, key))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._with_faults(name, found) if name in _METHODS else found

    def _with_faults(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def through(first: Any, *args: Any, **kwargs: Any) -> Any:
            if method == "delete":
                first = list(first)
            named = (first or [""])[0] if method == "delete" else first
            key = named if isinstance(named, str) else named.key
            if (fault := self.rule(method, key)) is not None:
                raise fault
            result = call(first, *args, **kwargs)
            if (fault := self.rule(f"after {method}", key)) is not None:
                raise fault
            return result

        return through
