"""speculators rewrites the model's forward pass; hooks on the decoder layers leave it alone."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat._version import __version__
from spec_vllm_compat.driver.session import Session
from spec_vllm_compat.errors import WorkerMismatchError
from spec_vllm_compat.protocol import EXTENSION, WANTED, Identity
from spec_vllm_compat.records import Kind, Process, Record
from spec_vllm_compat.seams import Change, Keyword, Members, Mixin, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="forward_hooks",
    kind=Kind.CORRECTNESS,
    why=(
        "speculators replaces the model's forward pass with a Llama-shaped loop. It fails with «object has no attribute "
        "'get_input_embeddings'» and drops whatever a model does around its layers: embedding scale, `llama_4_scaling`, "
        "deep-stack inputs. Forward hooks on the target layers leave the model alone, and rows are attributed to "
        "requests from the batch that the model runner really ran."
    ),
    changed=(
        "vLLM 0.11.1 renamed `get_input_embeddings` to `embed_input_ids`; DeepSeek layers take `llama_4_scaling` since "
        "0.12.0; attention backends and model runner V2 reorder batches."
    ),
    source="vllm/model_executor/models/llama.py line 378 in 0.11.0, line 427 in 0.11.1; deepseek_v2.py line 1310 in 0.12.0",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether ParallelConfig has `worker_extension_cls`",
    remove_when="never while speculators' in-process generator is supported",
    process=Process.WORKER,
)


class WorkerHandshake(Mixin):
    """Starts the session of a generator and makes sure that every worker runs what the driver runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import os

        self.session = Session()
        os.environ[WANTED] = "1"
        super().__init__(*args, **kwargs)
        try:
            self._shake_hands()
            # The executor is the one place between the start of the workers and the planning of the KV cache.
            if (ready := getattr(self, "workers_ready", None)) is not None:
                ready()
        except BaseException:
            self.shutdown()
            raise

    def _shake_hands(self) -> None:
        import vllm

        from spec_vllm_compat.patches import PATCH_SETS

        expected = tuple(sorted(p.record.id for p in PATCH_SETS if p.record.process is Process.WORKER))
        identities: list[Identity] = self.session.ask(self, "identify")
        for identity in identities:
            for what, here, there in (
                ("spec_vllm_compat", __version__, identity.version),
                ("vllm", vllm.__version__, identity.vllm),
                ("patch sets", expected, identity.patch_sets),
            ):
                if here != there:
                    raise WorkerMismatchError(
                        f"rank {identity.rank} runs {what} {there}, the driver {here}. Install the same packages for "
                        "driver and workers, then build a new generator."
                    )


def _probe(target: Target) -> Probe:
    if "worker_extension_cls" not in target.parameters("ParallelConfig"):
        raise SeamMissing("ParallelConfig(worker_extension_cls=)", "no such keyword")
    return Probe(True, "workers take an extension class")


def _set_extension(_target: Target, keywords: dict[str, Any]) -> None:
    keywords["worker_extension_cls"] = EXTENSION


def _changes(_target: Target) -> tuple[Change, ...]:
    return (
        Keyword("ParallelConfig", "worker_extension_cls", _set_extension),
        Members("MultiprocExecutor", WorkerHandshake),
    )


PATCH_SET = PatchSet(RECORD, _probe, _changes)
