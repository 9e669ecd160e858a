"""The picture in the README shows the shapes that the layers have."""

from docs.draw_layer import draw


def test_the_picture_names_what_each_rank_of_qwen3_0_6b_holds() -> None:
    texts = [text.get_text() for axes in draw().axes for text in axes.texts]
    for held in ("[2048, 1024]", "[1024, 1024]", "[3072, 1024]", "[1024, 1536]"):  # qkv, o, gate and up, down
        assert texts.count(f"holds {held}") == 2
    assert sum("query heads 8–15\nKV heads 4–7" in text for text in texts) == 1
