"""A server of completions that answers in place of a model here: what it says of itself, and what it completes."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from aatc_cli.errors import AatcError
from aatc_cli.evals.subjects import Subject

# seconds that one answer may take, the wait for its turn included
_PATIENCE = 600.0
# what `Plan.served_as` looks like
_PLAN = re.compile(r"[^/@]+@[0-9a-f]{12}")
_START = "start it by aatc serve --plan PLAN --model MODEL --start, and give its address as http://HOST:PORT"


@dataclass(frozen=True)
class Server:
    """A server at ``address``; ``model``: under which name it is asked, ``facts``: what it says of itself."""

    address: str
    model: str
    facts: dict[str, Any]

    @classmethod
    def open(cls, address: str, subject: Subject, model: str) -> Server:
        """The server at ``http://HOST:PORT``, if it serves with the plan of ``subject``, or ``model`` with none.

        A server started by ``aatc serve`` has the plan's name and digest among those of its models. What else a server
        serves is known by the last part of a name or of the folder it was started with alone. Raises `AatcError` for
        one that does not answer, or serves something else.
        """
        found = cls(address.rstrip("/").removesuffix("/v1"), "", {})
        if not found.address.startswith(("http://", "https://")):
            raise AatcError(f"{address!r} is no address of a server", _START)
        models = found._ask("/v1/models").get("data")
        listed = [each for each in models if isinstance(each, dict)] if isinstance(models, list) else []
        names = [each["id"] for each in listed if isinstance(each.get("id"), str)]
        if not names:
            raise AatcError(f"the server at {address} names no model", _START)
        plans = [name for name in names if _PLAN.fullmatch(name)]
        wanted = subject.plan.served_as if subject.plan else None
        if wanted is not None and wanted not in names:
            said = f"with {plans[0]}" if plans else "without a plan that it names"
            raise AatcError(f"the server at {address} serves {said}, not with {wanted}", _START)
        if wanted is None and plans:
            hint = "name that plan by --plan, or give the address of a server without one"
            raise AatcError(f"the server at {address} serves with {plans[0]}", hint)
        known = {_last(name) for name in [*names, *(str(each.get("root")) for each in listed)]}
        if wanted is None and _last(model) not in known:
            hint = f"ask a server of that model, or start it with --served-model-name {_last(model)}"
            raise AatcError(f"the server at {address} serves {names[0]}, and {model} was to be asked", hint)
        return cls(found.address, wanted or names[0], {"version": found._version(), "plan": wanted})

    def complete(self, tokens: list[int], room: int) -> str:
        """At most ``room`` greedy tokens behind ``tokens``, as text; raises `AatcError` with what the server says."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": room, "temperature": 0.0}
        answer = self._ask("/v1/completions", body)
        choices: Any = answer.get("choices")
        try:
            text = choices[0]["text"]
        except (TypeError, KeyError, IndexError):
            text = None
        if not isinstance(text, str):
            said = f": {json.dumps(answer)[:200]}"
            raise AatcError(f"the answer of {self.address} has no text{said}", _START)
        return text

    def _version(self) -> str | None:
        """What the server calls its version, where it tells."""
        try:
            return str(self._ask("/version").get("version"))
        except AatcError:
            return None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace").strip()
            hint = "what is asked must fit into its --max-model-len, and the engine must be alive"
            raise AatcError(f"{self.address}{path} answered {error.code}: {said}", hint) from error
        except TimeoutError as error:
            problem = f"the server at {self.address} gave no answer within {_PATIENCE:g} seconds"
            raise AatcError(problem, "look at what it says; the same command asks what is missing") from error
        except OSError as error:
            raise AatcError(f"the server at {self.address} does not answer: {error}", _START) from error
        except (ValueError, http.client.HTTPException) as error:
            # an address that is none, an answer that is no JSON, and one that ends in the middle
            problem = f"{self.address}{path} gave no answer of a server of completions: {error}"
            raise AatcError(problem, _START) from error
        return found if isinstance(found, dict) else {}


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
