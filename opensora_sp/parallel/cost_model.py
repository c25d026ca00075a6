"""Speed of a device and of its links, by which strategies, planner, schedule and sampler choose.

``CostModel`` has every rate; ``PRESETS`` in ``runtime/cost_models.py`` are the models of known
devices, and ``opensora-sp plan --calibrate`` measures one. Costs are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

ELEMENT_BYTES = 2  # bf16

# In seconds; may be 0.
TIMES = ("latency", "network_latency", "launch")
MIN_RATE = 1e-30

# Of one more chunk at the end of a block: 10 in forward, 30 in backward.
CHUNK_LAUNCHES = 40


@dataclass(frozen=True)
class Link:
    """The carrier of an exchange: its name, bytes per second of a rank, and latency in seconds."""

    name: str
    bandwidth: float
    latency: float

    def seconds(self, num_bytes: float, exchanges: float = 1) -> float:
        """Seconds in which a rank sends ``num_bytes`` in so many exchanges."""
        return num_bytes / self.bandwidth + exchanges * self.latency


@dataclass(frozen=True)
class CostModel:
    """Speed of a device and of its links. All ranks of a run must use the same one.

    Rates are those that models reach, not peaks: FLOP/s, bytes per second, seconds. Those that are
    left out are an H100's. The presets below say where the numbers come from.

    Args:
        flops: matrix products of a transformer, in the precision that the device trains in: bf16 on
            a GPU, fp32 on a CPU.
        bandwidth, latency: of an all-to-all within a node: what a rank sends, and from the launch
            to the first byte.
        network_bandwidth, network_latency: of an all-to-all between nodes.
        attention_forward, attention_backward: of attention, on whole tiles.
        attention_tile: queries and keys of a tile of attention's forward; backward swaps them. A
            tile is computed whole, so short rows are padded to it.
        memory_bandwidth: of elementwise kernels.
        launch: seconds in which the host queues an operator.
        asynchronous: whether the device computes while the host launches and while links send. On a
            CPU the same cores do all.
        memory: bytes of the device.

    Raises:
        ValueError: if a rate is not positive and finite, or a time is negative.
    """

    flops: float
    bandwidth: float
    latency: float

    # An adapter of 400 Gb/s for each GPU, of which 40 GB/s are assumed, and an assumed latency.
    network_bandwidth: float = 40e9
    network_latency: float = 20e-6

    # FlashAttention-2 at its published rates on padded tiles.
    attention_forward: float = 330e12
    attention_backward: float = 280e12
    attention_tile: tuple[int, int] = (128, 64)

    # 90 % of assumed 3.0 TB/s in copies.
    memory_bandwidth: float = 2.7e12

    # The host took 2.4 ms for a pair of blocks of STDiT3-XL/2 in plain torch, which are 250
    # operators, and 3.0 ms with Triton kernels (docs/performance.md), on a core that is slower than
    # a GPU server's. For kernels alone, 4 to 6 us were measured next to an H200.
    launch: float = 8e-6
    asynchronous: bool = True

    memory: float = 80e9
    name: str = "H100"

    def __post_init__(self) -> None:
        for rate in fields(self):
            number = getattr(self, rate.name)
            least = 0 if rate.name in TIMES else MIN_RATE
            if rate.type == "float" and not least <= number < math.inf:
                raise ValueError(
                    f"got {rate.name}={number} of the cost model {self.name!r}; expected positive "
                    "rates, and times of at least 0; take a preset of "
                    "opensora_sp.parallel.cost_model"
                )

    def link(self, *, spans_nodes: bool) -> Link:
        """The link that carries the exchanges of a group of ranks."""
        if spans_nodes:
            return Link("between nodes", self.network_bandwidth, self.network_latency)
        return Link("inside a node", self.bandwidth, self.latency)

    def attention(
        self, rows: float, queries: int, keys: int, width: int, *, backward: bool = False
    ) -> float:
        """Seconds of attention of ``rows`` rows, each of one head of ``width`` entries.

        Tiles are computed whole, and widths in steps of 32 where tiles are. Backward computes 2.5
        times the products of forward; on a GPU it sums the queries' gradients in fp32, in rows
        padded to the tile: written, and read (``flash_api.cpp`` of FlashAttention-2, Dao, 2023).
        """
        large, small = self.attention_tile
        tile = (small, large) if backward else (large, small)
        if large > 1:
            width = _padded(width, 32)

        pairs = 4.0 * rows * _padded(queries, tile[0]) * _padded(keys, tile[1]) * width
        if not backward:
            return pairs / self.attention_forward
        summed = 8.0 * rows * _padded(queries, large) * width if self.asynchronous else 0.0
        return 2.5 * pairs / self.attention_backward + summed / self.memory_bandwidth

    def elementwise(self, activations: float, width: int, element_size: int) -> float:
        """Seconds in which ``activations`` tokens of ``width`` are read or written."""
        return activations * width * element_size / self.memory_bandwidth

    def with_launches(self, seconds: float, operators: float) -> float:
        """Seconds of operators that take ``seconds`` on the device, with their launches."""
        launches = operators * self.launch
        return max(seconds, launches) if self.asynchronous else seconds + launches

    def to_dict(self) -> dict[str, Any]:
        """All rates by name, as JSON values."""
        rates = asdict(self)
        return {n: list(rate) if isinstance(rate, tuple) else rate for n, rate in rates.items()}

    def as_settings(self) -> dict[str, Any]:
        """All rates, under names by which ranks compare them with the rest of a config."""
        return {f"cost_model.{name}": rate for name, rate in self.to_dict().items()}

    @classmethod
    def from_dict(cls, values: Any) -> CostModel:
        """The model of ``to_dict``.

        Raises:
            ValueError: if a name is missing or unknown, or a value is no such rate.
        """
        expected = H100.to_dict()
        given = values if isinstance(values, dict) else {}
        wrong = sorted(expected.keys() ^ given.keys())
        for name in sorted(expected.keys() & given.keys()):
            if _kind(given[name]) != _kind(expected[name]):
                wrong.append(name)
        if wrong:
            raise ValueError(
                f"got a cost model with other {wrong}; expected names and values like {expected}; "
                "measure it anew with opensora-sp plan --calibrate FILE"
            )
        return cls(**{**given, "attention_tile": tuple(given["attention_tile"])})


# NVLink 4: 350 of 450 GB/s are assumed.
H100 = CostModel(flops=711e12, bandwidth=350e9, latency=5.9e-6, name="H100")

# Products and copies are 90 % of what was measured on one H200: 790 TFLOP/s in bf16, and 4.3 TB/s.
# An H100 differs in its memory alone.
H200 = replace(H100, memory_bandwidth=3.87e12, memory=141e9, name="H200")

# One thread of a server's CPU in fp32, measured by --calibrate; gloo on one machine is assumed.
CPU = CostModel(
    flops=80e9,
    bandwidth=1e9,
    latency=200e-6,
    network_bandwidth=1e9,
    network_latency=400e-6,
    attention_forward=60e9,
    attention_backward=65e9,
    attention_tile=(1, 1),
    memory_bandwidth=8.5e9,
    launch=15e-6,
    asynchronous=False,
    memory=16e9,
    name="CPU",
)


def best_chunks(model: CostModel, link: Link, num_bytes: float) -> int:
    """The number of chunks in which the busiest rank sends a switch of ``num_bytes``.

    Of K chunks all but the last are sent during the computation in forward, which saves 1 - 1/K of
    the switch. Each further chunk costs launches. One more than K does not pay where K (K + 1) is
    at least the ratio of the two.
    """
    if not model.asynchronous:
        return 1
    ratio = num_bytes / link.bandwidth / (CHUNK_LAUNCHES * model.launch)
    return max(1, math.ceil((math.sqrt(1 + 4 * ratio) - 1) / 2))


def block_flops(tokens: int, width: int) -> float:
    """Forward work of a block without attention scores: 28 C^2 a token, with an MLP of 4 C."""
    return 28.0 * width * width * tokens


def attention_flops(rows: int, length: int, width: int) -> float:
    """Forward work of attention over rows of ``length`` tokens."""
    return 4.0 * rows * length * length * width


def _padded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _kind(rate: Any) -> Any:
    """What a value of JSON has to share with another rate in its place."""
    if isinstance(rate, list):
        return [type(number) for number in rate]
    return float if type(rate) is int else type(rate)
