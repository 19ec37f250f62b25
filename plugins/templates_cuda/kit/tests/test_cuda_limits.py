"""Launches that no CUDA device takes are refused, whatever their target."""

import pytest
from agentcompile_cuda_kit import check_launches

from agentcompile_core.plugin_api import ContractError, DType, Feature, Launch, Role, StepSource, Tiling, tiles


def source(*features: Feature, **changes: object) -> StepSource:
    launch = Launch(**{"entry": "k_0", "grid": (4, 1, 1), "block": (128, 1, 1), "arguments": (), **changes})
    return StepSource(digest="0", code="", launches=(launch,), features=features)


def tiled(**changes: object) -> dict:
    view = {"offset": 8, "extents": (72, 9), "steps": (1, 80), "tile": (64, 256), "swizzle": 128, **changes}
    return {"arguments": (tiles("a", Role.INPUT, DType.BF16, Tiling(**view)),)}


@pytest.mark.parametrize("changes", [tiled(), tiled(swizzle=0, tile=(128, 1)), {},
                                     {"block": (1024, 1, 1)}, {"grid": (2**31 - 1, 65535, 65535)}, {"cluster": 4}])
def test_what_fits_is_taken(changes: dict) -> None:
    check_launches(source(**changes))


def test_large_clusters_are_for_sources_that_say_so() -> None:
    check_launches(source(Feature.LARGE_CLUSTER, cluster=16, grid=(16, 1, 1)))
    with pytest.raises(ContractError, match="cluster of 32 blocks; from 1 to 16"):
        check_launches(source(Feature.LARGE_CLUSTER, cluster=32, grid=(32, 1, 1)))


@pytest.mark.parametrize(("changes", "message"), [
    ({"block": (2048, 1, 1)}, "1024 threads"), ({"block": (32, 32, 2)}, "1024 threads"), ({"block": (1, 1, 65)}, "at most"),
    ({"grid": (1, 70000, 1)}, "grid"), ({"cluster": 16, "grid": (16, 1, 1)}, "cluster of 16"),
    (tiled(extents=(8,) * 6, steps=(1, *(8,) * 5), tile=(8,) * 6), "at most 5 axes"), (tiled(tile=(64, 257)), "tiles of 256"),
    (tiled(steps=(1, 81)), "multiples of 16 bytes"), (tiled(offset=4), "multiples of 16 bytes"),
    (tiled(tile=(60, 8)), "multiples of 16 bytes"),
    (tiled(tile=(72, 8)), "no longer than a swizzle"), (tiled(steps=(1, 2**39)), "steps"),
])
def test_what_does_not_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_launches(source(**changes))
