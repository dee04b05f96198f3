"""The class that vLLM mixes into its worker (``ParallelConfig.worker_extension_cls``)."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from typing import Any

from spec_vllm_compat._version import __version__
from spec_vllm_compat.protocol import Answer, Capturing, Identity, Layout, Segment, Step
from spec_vllm_compat.worker.capture import Capture
from spec_vllm_compat.worker.sink import Sink

#: Patch sets whose code runs here. The driver compares this with its own list.
PATCH_SETS = ("forward_hooks", "recurrent_state", "two_phase")


class HiddenStatesCapture:
    """Methods that the driver calls on every worker. vLLM never runs ``__init__`` of an extension class."""

    model_runner: Any
    vllm_config: Any

    def spec_vllm_compat_ask(self, request: str, *args: Any) -> Answer:
        """Answer ``identify``, ``capture``, ``attach``, ``step`` or ``finish``. Never raises: see :class:`Answer`."""
        try:
            handler: Any = {
                "identify": _identify,
                "capture": _capture,
                "attach": _attach,
                "step": _step,
                "finish": _finish,
            }[request]
            return Answer(handler(self, *args))
        except Exception as error:  # noqa: BLE001 - it is raised again in the driver
            return Answer(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")

    # What speculators itself asks for. Its driver gets everything from the steps.
    def _setup_hidden_states_capture(self, layer_ids: Any) -> None:
        pass

    def _reset_capture(self) -> None:
        pass

    def _set_request_metadata(self, request_metadata: Any) -> None:
        pass

    def _get_captured_states(self) -> None:
        pass


def _identify(worker: Any) -> Identity:
    import vllm
    from vllm.distributed import get_tp_group

    from spec_vllm_compat import plugin

    return Identity(
        rank=worker.rank,
        tensor_parallel_rank=get_tp_group().rank_in_group,
        version=__version__,
        vllm=vllm.__version__,
        patch_sets=PATCH_SETS,
        model_runner="V1" if hasattr(worker.model_runner, "input_batch") else "V2",
        plugin=plugin.loaded,
    )


def _capture(worker: Any, layer_ids: tuple[int, ...]) -> Capturing:
    from vllm.distributed import get_tp_group

    if multiprocessing.parent_process() is not None:
        # A terminal sends Ctrl-C to the workers too, and vLLM's end on it. They end when the driver does.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    before: Capture | None = vars(worker).pop("_spec_vllm_compat", None)
    sink = before.remove() if before is not None else Sink(worker.model_runner.device)
    capture = Capture(worker, layer_ids, sink, keep=get_tp_group().rank_in_group == 0)
    worker._spec_vllm_compat = capture
    return capture.capturing


def _attach(worker: Any, segment: Segment | None, retired: tuple[Segment, ...]) -> str:
    capture: Capture = worker._spec_vllm_compat
    return capture.attach(segment, retired)


def _step(worker: Any, scheduler_output: Any, layout: Layout | None) -> Step:
    capture: Capture = worker._spec_vllm_compat
    return capture.step(worker, scheduler_output, layout)


def _finish(worker: Any) -> str:
    capture: Capture = worker._spec_vllm_compat
    capture.finish()
    return capture.meaning.value
