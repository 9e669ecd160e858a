"""The pictures in the README show what the code does."""

from docs import draw_communication, draw_layer


def test_the_layer_names_what_each_rank_of_qwen3_0_6b_holds() -> None:
    texts = [text.get_text() for axes in draw_layer.draw().axes for text in axes.texts]
    for held in ("[2048, 1024]", "[1024, 1024]", "[3072, 1024]", "[1024, 1536]"):  # qkv, o, gate and up, down
        assert texts.count(f"holds {held}") == 2
    assert sum("query heads 8–15\nKV heads 4–7" in text for text in texts) == 1


def test_the_communication_names_buffers_and_limits_of_two_ranks() -> None:
    texts = [text.get_text() for axes in draw_communication.draw().axes for text in axes.texts]
    for said in ("buffer, one of 3 in turn:\nwhat rank 1 sent", "buffer, one of 3 in turn:\nwhat rank 0 sent"):
        assert texts.count(said) == 1
    assert any(text.startswith("one shot, up to 2 MiB") for text in texts)
    assert any(text.startswith("two shots, up to 256 MiB") for text in texts)
