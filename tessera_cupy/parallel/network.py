"""How fast GPUs send to each other: public figures of NVLink and of networks between hosts.

=================  ==================  =========================================================
network            GB/s, one way       source
=================  ==================  =========================================================
NVLink 3           300                 NVIDIA A100 data sheet (2021): 600 GB/s, both ways
NVLink 4           450                 NVIDIA H100 and H200 data sheets: 900 GB/s, both ways
NVLink 5           900                 NVIDIA HGX B200 data sheet: 1.8 TB/s, both ways
PCIe 4.0 x16       32                  PCI-SIG: 16 GT/s a lane, 16 lanes
PCIe 5.0 x16       64                  PCI-SIG: 32 GT/s a lane, 16 lanes
InfiniBand HDR     25                  DGX A100 data sheet: a 200 Gb/s adapter for each GPU
InfiniBand NDR     50                  DGX H100 data sheet: a 400 Gb/s adapter for each GPU
=================  ==================  =========================================================

Transfers are taken to reach 80% of that, and to begin after 20 microseconds: round numbers, not
measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera_cupy.errors import wrong

#: Share of a link's bandwidth that transfers reach, and milliseconds until one begins.
EFFICIENCY = 0.8
LATENCY_MS = 0.02


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        name: as in the table above.
        gbs: GB/s that a GPU sends, and receives at the same time.
    """

    name: str
    gbs: float

    def ms(self, count: float) -> float:
        """Milliseconds of a transfer of so many bytes, without what it takes to begin.

        >>> find_link("InfiniBand NDR").ms(40e6)
        1.0
        """
        return count / (EFFICIENCY * self.gbs * 1e6)


#: Every link by name.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("NVLink 3", 300),
        Link("NVLink 4", 450),
        Link("NVLink 5", 900),
        Link("PCIe 4.0 x16", 32),
        Link("PCIe 5.0 x16", 64),
        Link("InfiniBand HDR", 25),
        Link("InfiniBand NDR", 50),
    )
}

# Of each GPU of the cost model, the link within a host and that between hosts.
_OF_GPU = {
    "A100-SXM4-80GB": ("NVLink 3", "InfiniBand HDR"),
    "H100 SXM": ("NVLink 4", "InfiniBand NDR"),
    "H200": ("NVLink 4", "InfiniBand NDR"),
    "B200": ("NVLink 5", "InfiniBand NDR"),
    "RTX 5090": ("PCIe 5.0 x16", "InfiniBand HDR"),
    "RTX PRO 6000": ("PCIe 5.0 x16", "InfiniBand HDR"),
}
_OTHERS = ("PCIe 4.0 x16", "InfiniBand HDR")


@dataclass(frozen=True)
class Network:
    """What connects the ranks.

    Attributes:
        within: the link between GPUs of one host.
        between: the link from a GPU to other hosts.
        per_host: consecutive ranks on one host.
    """

    within: Link
    between: Link
    per_host: int

    def link(self, ranks: int) -> Link:
        """The slowest link among so many consecutive ranks, of which the first begins a host."""
        return self.within if ranks <= self.per_host else self.between


def find_link(name: str) -> Link:
    """The link of a name.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if name not in LINKS:
        raise ValueError(wrong("link", f"one of {', '.join(LINKS)}", repr(name), "name one"))
    return LINKS[name]


def usual_network(gpu: str, per_host: int = 8) -> Network:
    """What a GPU is usually connected by.

    >>> usual_network("H200").within.name
    'NVLink 4'
    """
    within, between = _OF_GPU.get(gpu, _OTHERS)
    return Network(LINKS[within], LINKS[between], per_host)
