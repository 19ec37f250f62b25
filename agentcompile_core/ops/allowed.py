"""The closed list of operators that a stored graph may call: pure functions of tensors, and writes that their schema declares.

A graph may come from a bundle that somebody else made. What is not here (files, printing, allocators, random numbers, changes of
a tensor's metadata, reads into the host) is refused, however harmless it may be. An operator must be known by name, or carry
torch's tag ``core`` or ``pointwise``, and its schema must be of the allowed form as well.
"""

import re
from typing import Any

import torch

from ..configuration import defaults

_NAMES = frozenset("""
    _adaptive_avg_pool2d _adaptive_avg_pool3d _convolution _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _log_softmax
    _native_batch_norm_legit_no_training _prelu_kernel rrelu _reshape_alias _safe_softmax _scaled_dot_product_attention_math
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _softmax
    _to_copy _trilinear _unsafe_index _unsafe_view _weight_norm _weight_norm_interface
    __and__ __or__ __xor__ __lshift__ __rshift__
    absolute adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    addbmm addmv addr adjoint affine_grid_generator alias alias_copy all alpha_dropout aminmax arange arccos arccosh arcsin arcsinh
    arctan arctan2 arctanh argsort argwhere as_strided_copy atleast_1d atleast_2d atleast_3d baddbmm batch_norm bilinear
    binary_cross_entropy binary_cross_entropy_with_logits block_diag broadcast_tensors broadcast_to bucketize bincount cartesian_prod
    cdist chain_matmul channel_shuffle cholesky cholesky_inverse cholesky_solve chunk column_stack combinations concat concatenate conj
    contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d copy corrcoef cosine_embedding_loss
    cosine_similarity count_nonzero cov cross cross_entropy_loss cummax cummin cumprod cumulative_trapezoid detach detach_copy diag
    diag_embed diagflat diagonal_copy diagonal_scatter diff dist divide dot dropout dsplit dstack einsum elu embedding_bag empty_like
    expand_as expand_copy eye feature_alpha_dropout feature_dropout
    fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
    fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fix flatten fliplr flipud floor_divide frobenius_norm ger glu
    greater greater_equal grid_sampler grid_sampler_3d group_norm gru gru_cell hamming_window hann_window hardswish
    hinge_embedding_loss histc hsplit hstack huber_loss im2col imag index index_add index_copy index_fill index_reduce inner
    instance_norm inverse isclose isin isreal kl_div kron kthvalue l1_loss layer_norm less less_equal lift lift_fresh lift_fresh_copy
    linalg_cholesky linalg_cholesky_ex linalg_cross linalg_det linalg_diagonal linalg_eigh linalg_eigvalsh linalg_householder_product
    linalg_inv linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matmul linalg_matrix_exp linalg_matrix_norm
    linalg_matrix_power linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot
    linalg_vector_norm linear linspace log_sigmoid log_sigmoid_forward log_softmax logcumsumexp logdet logspace logsumexp lstm
    lstm_cell mH mT margin_ranking_loss masked_select matmul matrix_H matrix_exp matrix_power max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_unpool2d max_unpool3d median meshgrid mode moveaxis movedim mse_loss msort multi_margin_loss
    multilabel_margin_loss multiply mv nanmean nanmedian nanquantile nansum narrow narrow_copy native_channel_shuffle native_norm
    negative new_empty new_empty_strided new_full new_ones new_zeros nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd
    nonzero_numpy nonzero_static norm norm_except_dim not_equal nuclear_norm numpy_T one_hot ones ones_like outer pad pad_sequence
    pairwise_distance pdist permute_copy pixel_shuffle pixel_unshuffle poisson_nll_loss polar prelu put qr quantile range ravel real
    renorm repeat_interleave reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll
    rot90 row_stack scaled_dot_product_attention searchsorted segment_reduce select_copy slice_copy slice_inverse slogdet
    smooth_l1_loss soft_margin_loss softmax special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit
    special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_log1p special_log_softmax special_logit
    special_logsumexp special_multigammaln special_ndtr special_polygamma special_psi special_round special_sinc special_softmax
    special_xlogy split split_copy split_with_sizes_copy squeeze_copy stack std std_mean stft istft subtract sum_to_size svd swapaxes
    swapdims t t_copy take take_along_dim tensor_split tensordot tile to trace transpose transpose_copy trapezoid trapz
    triangular_solve tril tril_indices triplet_margin_loss triu triu_indices type_as unbind unbind_copy unflatten unfold unfold_copy
    unique_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze_copy upsample_bicubic2d upsample_linear1d
    upsample_nearest1d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d vander var_mean vdot view_as view_as_complex
    view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack zeros zeros_like
    conv_depthwise3d convolution bartlett_window blackman_window kaiser_window index_select native_dropout
""".split())  # noqa: SIM905  five hundred names
_WRITES = frozenset({"copy_", "zero_", "fill_", "index_put_", "_index_put_impl_", "fill_diagonal_"})  # beside those of a pure twin
_PRIMS = frozenset("""
    abs acos acosh add amax amin as_strided asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_in_dim
    cat ceil clone collapse_view convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 fmax fmin fmod full
    full_like ge gcd gt iota isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ne neg pow reciprocal remainder reshape rev
    round rsqrt select shift_left shift_right_arithmetic sign signbit sin sinh slice slice_in_dim split_dim sqrt squeeze sub sum tan tanh
    transpose trunc var view_of where xor_sum
""".split())  # noqa: SIM905
_RANDOM = frozenset({  # draw nothing where they are not training, which ``unfit`` demands
    "dropout", "alpha_dropout", "rrelu", "feature_dropout", "feature_alpha_dropout", "native_dropout", "scaled_dot_product_attention",
    "lstm", "gru", "rnn_relu", "rnn_tanh", "_scaled_dot_product_attention_math", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
})
_TRAINING = frozenset({"training", "train", "use_input_stats"})  # statistics, where given, are written where these hold
_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_HIDDEN = re.compile(rf"_backward|^_({defaults.LIBRARIES}|test|foreach|fused_(?!rms)|sparse|nested|amp|philox)"
                     rf"|^({defaults.LIBRARIES}|sparse|quantized|record|sym)_|from_file|resize|rename|print|save")


def refusal(operator: Any) -> str:
    """Why a graph may not call this overload, as the end of a sentence; empty where it may.

    ``operator`` is a ``torch._ops.OpOverload`` of aten, prims or agentcompile.
    """
    namespace, name = operator.namespace, operator._schema.name.partition("::")[2]
    if namespace == "agentcompile":
        return ""
    if namespace == "prims":
        known = name in _PRIMS
    else:
        known = name in _NAMES or name in _WRITES or _tagged(torch.ops.aten, name) or (name.endswith("_") and _is_pure_twin(name[:-1]))
    return _form(operator, name) if known else "is not among the operators that a graph may call"


def _tagged(namespace: Any, name: str) -> bool:
    """Whether torch calls any overload of that name a core or a pointwise operator (it tags few overloads of some)."""
    packet = getattr(namespace, name, None)
    tags = [tag for overload in packet.overloads() for tag in getattr(packet, overload).tags] if packet is not None else []
    return (torch.Tag.core in tags or torch.Tag.pointwise in tags) and _HIDDEN.search(name) is None


def _is_pure_twin(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(not refusal(getattr(packet, overload)) for overload in packet.overloads())


def _form(operator: Any, name: str) -> str:
    """The same question to the schema: tensors out, at most the first operand written, no random numbers, no metadata changed."""
    schema, tags = operator._schema, operator.tags
    if torch.Tag.inplace_view in tags and name != "detach_":  # export detaches the constants that it lifts; their form stays
        return "changes the form of a tensor in place"
    if not schema.returns or any("Tensor" not in str(one.type) for one in schema.returns):
        return "returns something else than tensors"
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written and (not name.endswith("_") or len(written) > 1 or schema.arguments[0].alias_info is None):
        return "writes to something else than its first operand"
    drawn = torch.Tag.nondeterministic_seeded in tags or any("Generator" in str(a.type) for a in schema.arguments)
    if drawn and name.removesuffix("_") not in _RANDOM:
        return "draws random numbers"
    if any(str(a.type) in ("Storage", "Stream", "Dimname", "List[Dimname]", "List[str]") for a in schema.arguments):
        return "takes something else than tensors, numbers and types"
    return ""


def unfit(op: str, given: dict[str, Any]) -> str:
    """Why a call may not have these arguments (by name, defaults filled in): it trains, so it draws numbers or writes statistics."""
    name = op.split(".")[1].removesuffix("_")
    keeps_none = name in _STATISTICS and given.get("running_mean") is None and given.get("running_var") is None
    if name in _STATISTICS | _RANDOM and not keeps_none and any(given.get(key) is True for key in _TRAINING):
        return "is called as in training"
    if name in _RANDOM and "dropout_p" in given and given["dropout_p"] != 0:
        return "is called as in training"
    return ""
