"""The operators by how their bytes are counted: names only, without overload or a trailing underscore.

An operator that is in none of these, has no rule in `rules.py` and no tag of torch's that says that it
is pointwise is not counted.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Views and metadata: no data is touched (views by their schema need no entry).
METADATA = _names(
    """
    _assert_tensor_metadata _fused_sdp_choice _has_compatible_shallow_copy_type _nested_tensor_size
    _reshape_alias _unsafe_view alias can_cast dense_dim detach detach_ dim empty empty_like
    empty_permuted empty_quantized empty_strided is_complex is_contiguous is_floating_point is_pinned
    is_same_size is_strides_like_format lift lift_fresh new_empty new_empty_strided numel record_stream
    resize_ result_type set_ set_data size sparse_dim storage_offset stride sym_is_contiguous sym_numel
    sym_size sym_storage_offset sym_stride unsafe_split unsafe_split_with_sizes
    """
)

#: Every operand is read once and every result written once. Operators that torch tags as pointwise, those
#: of `_foreach_*`, and the in-place and out forms of these names need no entry.
WHOLE = _names(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _addmm_activation
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _conj_physical _convolution
    _efficient_attention_backward _efficient_attention_forward _flash_attention_backward
    _flash_attention_forward _fused_rms_norm _fused_rms_norm_backward _int_mm _local_scalar_dense
    _log_softmax _log_softmax_backward_data _pin_memory _safe_softmax
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_mm _softmax _softmax_backward_data _to_copy _weight_norm_interface
    _weight_norm_interface_backward addbmm addmm addmv addr all amax amin aminmax any arange argmax
    argmin argsort avg_pool2d avg_pool2d_backward baddbmm bernoulli binary_cross_entropy
    binary_cross_entropy_backward bincount bmm bucketize cat clone col2im complex constant_pad_nd
    convolution copy count_nonzero cudnn_convolution cummax cumprod cumsum diag_embed diagonal_backward
    dot embedding_dense_backward equal eye flip floor_divide full glu glu_backward histc huber_loss
    huber_loss_backward im2col kthvalue linalg_vector_norm linear linspace logcumsumexp logsumexp
    masked_fill max max_pool2d_with_indices max_pool2d_with_indices_backward mean median min
    mkldnn_convolution mm mode mse_loss mse_loss_backward multinomial mv native_channel_shuffle
    native_dropout native_dropout_backward native_group_norm native_layer_norm nonzero norm ones outer
    pixel_shuffle pixel_unshuffle prod rand randint randn randperm reflection_pad2d repeat
    repeat_interleave roll rot90 scalar_tensor searchsorted select_backward slice_backward
    smooth_l1_loss smooth_l1_loss_backward soft_margin_loss sort split_with_sizes_copy stack std
    std_mean sum topk trace tril tril_indices triu triu_indices unfold_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward var var_mean zeros
    """
)

#: In-place operators that write what they do not read.
OVERWRITING = _names(
    """
    _foreach_copy_ _foreach_zero_ bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_
    normal_ random_ uniform_ zero_
    """
)

#: Arguments of which only shape and dtype are looked at.
UNREAD = {
    **dict.fromkeys(
        _names(
            """
            empty_like full_like new_full new_ones new_zeros ones_like rand_like randint_like randn_like
            zeros_like
            """
        ),
        ("self",),
    ),
    "copy": ("self",),
    "native_layer_norm_backward": ("bias",),
    "nll_loss_backward": ("self",),
    "nll_loss2d_backward": ("self",),
}
