"""Diagnosis of alerts on golden checks."""

from __future__ import annotations

from exporters.catalogue import golden, prometheus, sidecar
from runbooks.diagnosis.row import INSTANCE, MODEL, DiagnosisRow, at, eq, filled, no

_CHECKED = (filled("address"), MODEL)  # engine of a golden check
_AT_ADDRESS = 'instance=~"{{address}}"'

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMGoldenDiffers": (
        DiagnosisRow(
            "the release, configuration or model was changed within two hours",
            f"time() - max by (kind) ({at(sidecar.EVENT_TIME, eq('kind', 'change|version|config'))}) < 7200",
            "the baseline is of the former state",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the cause is a tokenizer, template, dtype, model or release",
            f"{at(golden.GOLDEN_VERDICT, eq('cause', 'tokenizer|template|dtype|model|release'), *_CHECKED)} == 1",
            "the engine was started with other files or options than the recorded one",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the cause is not_finite, repetition, numeric or decode",
            f"{at(golden.GOLDEN_VERDICT, eq('cause', 'not_finite|repetition|numeric|decode'), *_CHECKED)} == 1",
            "damaged weights, a faulty GPU, or another GPU or kernel than the recorded one",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "other engines of the model have the same verdict",
            f"count by (model_name, cause) ({at(golden.GOLDEN_VERDICT, no('verdict', 'same'), MODEL)}) > 1",
            "something that they share: the model's files, the image, an option",
            "Mitigation 2",
        ),
    ),
    "VLLMGoldenStale": (
        DiagnosisRow(
            "the sidecar cannot read the result file",
            f"{at(sidecar.SOURCE_UP, eq('kind', 'golden'), INSTANCE)} == 0",
            "the file is gone, damaged, or not readable for the sidecar",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the engine does not answer Prometheus either",
            f"{at(prometheus.UP, eq('job', 'vllm.*'), _AT_ADDRESS)} == 0",
            "the engine is down, so nothing can be checked",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "other engines were checked meanwhile",
            f"time() - max by (instance) ({at(golden.GOLDEN_CHECKED, INSTANCE)})"
            f" < max by (instance) ({at(golden.GOLDEN_INTERVAL, INSTANCE)})",
            "this engine cannot be checked, or is no longer among those that the command was given",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "no engine was checked",
            f"time() - max by (instance) ({at(golden.GOLDEN_CHECKED, INSTANCE)})"
            f" >= max by (instance) ({at(golden.GOLDEN_INTERVAL, INSTANCE)})",
            "the command does not run, or its tokens of the hour are used",
            "Mitigation 1",
        ),
    ),
}
