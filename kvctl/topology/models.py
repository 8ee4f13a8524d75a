"""The topology file's models. A key stands here only if it does something.

The descriptions are what docs/topology.md and ``kvctl config --schema`` say. What one field
cannot know of another is judged in ``checks``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
)

from kvctl.topology.fields import (
    Address,
    Anything,
    Endpoint,
    Gpu,
    Kind,
    Lease,
    Line,
    Model,
    Name,
    Seconds,
    Secret,
    Size,
    Variable,
    Whole,
    Written,
    spelling,
)
from kvctl.topology.flags import each_once, flag_name, flag_value

VERSION = 1

Args = Annotated[
    dict[
        Annotated[str, BeforeValidator(flag_name), Kind("flag")],
        Annotated[Any, PlainValidator(flag_value), WithJsonSchema({}), Kind("any value")],
    ],
    BeforeValidator(each_once),
]
Env = dict[Variable, Written]
Role = Literal["prefill", "decode"]


def _known_version(value: Any) -> Any:
    if value != VERSION or isinstance(value, bool):
        raise ValueError(
            f"{spelling(value)} is not a version that this kvctl reads; write {VERSION}, or use a "
            "newer kvctl"
        )
    return VERSION


def _pull_only(value: Any) -> Any:
    if value == "push":
        raise ValueError(
            "push is not supported yet: the connector guards its leases and completions in pull "
            "mode only; write pull, or leave it out"
        )
    return value


def _router_or_none(value: Any) -> Any:
    if value == "none":
        return None
    if not isinstance(value, dict | Router):
        raise ValueError(f"{spelling(value)}: write its settings, or none for no router")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Engine(_Strict):
    """Where vLLM is installed."""

    python: Line | None = Field(
        default=None,
        description="Python of the environment that has vLLM: a path, a folder that holds an "
        "environment, or a command. A relative path counts from the file's folder. Default: "
        "`$KVCTL_ENGINE_PYTHON`, else the first with vLLM of kvctl's own environment, "
        "`$VIRTUAL_ENV`, `./.venv` and `python3`.",
    )


class Node(_Strict):
    """One machine."""

    address: Address = Field(
        description="Where the other nodes reach it. Its engines listen there, and only there."
    )


class Transfer(_Strict):
    """How KV goes from prefill to decode."""

    mode: Annotated[Literal["pull"], BeforeValidator(_pull_only)] = Field(
        default="pull", description="Who moves the KV: `pull`, decode reads it from prefill."
    )
    kv_load_failure_policy: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="What becomes of a request whose KV could not be loaded: `recompute` its "
        "prompt on decode, or `fail` it.",
    )
    kv_lease_duration: Lease = Field(
        default=30.0,
        description="How long prefill keeps a finished request's KV for a decode that has not "
        "asked for it; renewed while decode is waiting.",
    )
    offer_key: Line | None = Field(
        default=None,
        description="File of mode 0600 with the key by which prefill signs what it offers; all "
        "nodes need the same. One key a line: the first signs, all are accepted, so a key can be "
        "changed one engine after the other. A relative path counts from the file's folder. "
        "Default: kvctl makes a key for the topology in its state folder.",
    )
    connector: Literal["compose", "observe"] = Field(
        default="compose",
        description="What kvctl's connector does: `compose`, its choice of tier and its guards; "
        "`observe`, vLLM's own behaviour, only measured.",
    )
    tier_policy: Literal["fastest", "upstream"] = Field(
        default="fastest",
        description="Which tier a request is loaded from: the `fastest` by what was measured, or "
        "`upstream`'s order: NIXL, then host memory.",
    )
    composed_hits: Literal["never", "faster", "always"] = Field(
        default="faster",
        description="Whether one request is loaded from two tiers, a prefix from host memory and "
        "the rest from prefill: `never`; where host memory is the `faster` of the two; `always`.",
    )
    wait_deadline: Seconds = Field(
        default=20.0,
        description="How long a request waits for its KV before it is answered without.",
    )
    backends: list[Line] = Field(
        default=["UCX"], min_length=1, description="NIXL back ends, for example `UCX`, `LIBFABRIC`."
    )


class Offload(_Strict):
    """The host memory tier."""

    host: Size = Field(
        description="Host memory for KV blocks. At the top level: of each node, split evenly "
        "over its engine ranks. In an instance: of each of its engines."
    )
    extra: dict[str, Anything] = Field(
        default={},
        description="Further keys for the OffloadingConnector's `kv_connector_extra_config`; "
        "they replace what kvctl writes there.",
    )


class Otlp(_Strict):
    """Where the relays export to."""

    endpoint: Endpoint = Field(description="Base URL of the OTLP receiver.")
    protocol: Literal["http", "grpc"] = Field(
        default="http",
        description="`http` (protobuf, usually port 4318) or `grpc` (usually 4317; needs "
        "`pip install kvctl[otlp-grpc]`).",
    )
    interval: Seconds = Field(default=10.0, description="Time between two exports of the metrics.")
    headers: dict[Line, Secret] = Field(
        default={},
        description="Headers of each export, for example `authorization: Bearer ${OTLP_TOKEN}`. "
        "Values are written with `${NAME}` only, so that no secret is in the file.",
    )


class Telemetry(_Strict):
    """What leaves the engines about them."""

    otlp: Otlp | None = Field(
        default=None, description="Export by OTLP: starts one relay per engine rank. Default: none."
    )


class Instance(_Strict):
    """Engines that are alike."""

    role: Role = Field(description="`prefill` or `decode`.")
    replicas: Whole = Field(default=1, ge=1, le=1000, description="How many engines of this kind.")
    gpus: list[Gpu] | None = Field(
        default=None,
        min_length=1,
        description="GPUs of the node by number or UUID (MIG slices too), dealt out in order: "
        "tensor × pipeline × data parallel size to each replica. Left out on CPUs.",
    )
    args: Args = Field(
        default={}, description="Flags of `vllm serve` for these engines; each replaces the file's."
    )
    env: Env = Field(
        default={}, description="Environment variables for these engines; each replaces the file's."
    )
    node: Name | None = Field(
        default=None, description="The node they run on; needed where nodes are."
    )
    offload: Offload | None = Field(
        default=None, description="Host memory tier of these engines, instead of the file's."
    )


class Router(_Strict):
    """vllm-router, in front of the engines."""

    port: Annotated[Whole, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port for clients. Default: `ports.base`."
    )
    host: Address = Field(
        default="127.0.0.1",
        description="Address it listens on; `0.0.0.0` is every one of the node.",
    )
    policy: Literal[
        "round_robin",
        "random",
        "cache_aware",
        "power_of_two",
        "consistent_hash",
        "sticky_least_loaded",
    ] = Field(
        default="round_robin", description="How engines are chosen, vllm-router's `--policy`."
    )
    node: Name | None = Field(default=None, description="The node it runs on. Default: the first.")


class Ports(_Strict):
    """The block of ports that belongs to the topology."""

    base: Whole = Field(
        default=8100,
        ge=1024,
        le=65535,
        description="First port of the block; the layout is below. Keep the block under the "
        "ephemeral range, on Linux usually 32768 and up.",
    )


class Topology(_Strict):
    """A prefill/decode deployment: one file."""

    version: Annotated[Literal[1], BeforeValidator(_known_version)] = Field(
        default=1, description="Version of this format."
    )
    name: Name = Field(
        description="Names the topology on the command line, in paths and in telemetry."
    )
    model: Model = Field(
        description="What vLLM loads: a Hugging Face id, or a path. A path begins with `/`, "
        "`./`, `../` or `~`; a relative one counts from the file's folder."
    )
    engine: Engine = Field(default=Engine(), description="Where vLLM is installed.")
    args: Args = Field(default={}, description="Flags of `vllm serve` for every engine.")
    env: Env = Field(default={}, description="Environment variables for every engine.")
    nodes: dict[Name, Node] = Field(
        default={},
        description="Machines, by name. Each runs its part: `kvctl launch --node NAME`. Without "
        "nodes everything runs on this machine, on 127.0.0.1.",
    )
    transfer: Transfer = Field(
        default=Transfer(), description="How KV goes from prefill to decode."
    )
    offload: Offload | None = Field(default=None, description="Host memory tier. Default: none.")
    telemetry: Telemetry = Field(
        default=Telemetry(), description="What leaves the engines about them."
    )
    instances: dict[Name, Instance] = Field(
        min_length=1, description="Engines, by name: at least one prefill and one decode."
    )
    router: Annotated[Router | None, BeforeValidator(_router_or_none)] = Field(
        default=Router(), description="vllm-router, in front of the engines; `none` for no router."
    )
    ports: Ports = Field(
        default=Ports(), description="The block of ports that belongs to the topology."
    )
    start_timeout: Seconds = Field(
        default=900.0, description="Time for an engine to get ready, model loading included."
    )
    stop_timeout: Seconds = Field(
        default=30.0, description="Time for an engine to end by itself before it is killed."
    )

    _source: str = PrivateAttr("topology")
    _place: Callable[[tuple[str | int, ...]], str] | None = PrivateAttr(None)

    @property
    def source(self) -> str:
        """The file, as messages name it."""
        return self._source

    def place(self, *path: str | int) -> str:
        """``file:line:column`` of the value at `path`, or of what it would belong to."""
        return self._place(path) if self._place else self._source
