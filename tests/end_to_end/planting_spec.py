"""A host tier that can plant one wrong block, for the self-test of the answers' comparison.

It exists in the tests only: the engine finds it because their topology names this module. While
the file named by PLANT_WHEN exists, the next load from host memory gets one wrong block: its
last one also in the place of its first.
"""

import os
from pathlib import Path
from typing import Any

from kvctl_connector.host_memory import HostMemorySpec, HostMemoryWorker

PLANT_WHEN = "KVCTL_TEST_PLANT_WHEN"


class PlantingHostWorker(HostMemoryWorker):
    def _copy(self, device: Any, host: Any, *, to_host: bool) -> int:
        flag = Path(os.environ[PLANT_WHEN])
        if not to_host and flag.exists():
            flag.unlink()
            first, last = (int(host.block_ids[at]) for at in (0, -1))
            assert first != last, "this load has one block only"
            for rows in self._host:
                rows[first] = rows[last]
        return super()._copy(device, host, to_host=to_host)


class PlantingHostSpec(HostMemorySpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            self._worker = PlantingHostWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        return self._worker
