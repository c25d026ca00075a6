"""How matrix products add up."""

import torch


def accumulate_in_fp32() -> None:
    """Let cuBLAS add the partial sums of split matrix products in fp32, in the whole process.

    By torch's defaults it may add them in bf16 or fp16. The gradient of a weight is a sum over
    tokens, which is what cuBLAS splits.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
