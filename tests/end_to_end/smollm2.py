"""Texts that the demo model continues.

The continuations were measured with transformers (greedy; the same ids in float32, bfloat16 and
float16). Each but CHAT keeps a distance of more than 1 between its two best logits.
"""

ALPHA = "Here is the English alphabet: ABC"
ALPHA_TEXT = "DEFGHIJKLMNOPQRSTUVWXYZ"  # 14 tokens: DEF GH I J K LM N OP QR ST UV W XY Z
ALPHA_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74]
NUM = "1, 2, 3, 4, 5, 6, 7,"
NUM_TEXT = " 8, 9, 10, 11, 12, 1"  # 20 tokens
NUM_IDS = [216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216, 33, 34, 28, 216, 33]
CJK = "你好 你好 你好 你好 你好 你好"
CJK_TEXT = " 你好 你好 你好 你好"  # 20 tokens: each character is two
CZ = "ďábel ďábel ďábel ďábel ďábel"
CZ_TEXT = " ďábel ďábel ďábel ďábel ďábel"  # 20 tokens
LONG = "The quick brown fox jumps over the lazy dog. " * 40 + "The quick brown"  # 403 tokens
LONG_TEXT = " fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog"  # 16
NUMLONG = "1, 2, 3, " + ", ".join(map(str, range(4, 150))) + ","  # 636 tokens
NUMLONG_TEXT = " 150, 151, 152, 153, 154"  # 24
CHAT = [{"role": "user", "content": "What is 2+2?"}]  # 37 tokens
CHAT_TEXT = "The answer to this classic math problem is 4."  # 12 tokens with the end
HELLO = 19556  # the token "Hello"
