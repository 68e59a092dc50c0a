"""Least squares: which weights of the backward passes give the gradient that the optimizer has used.

    used gradient = sum of weight_i * gradient of pass i + s * (gradient of the last update) + late passes
                    + weight decay

Each parameter has its rows, which are divided by its norm, so that all parameters count the same. The sum of
the parameters' distances is minimised, not that of their squares, by iteratively reweighted least squares. So
a minority of parameters with other weights does not change the result, and stands out.

A weak prior says that all passes count the same, and that nothing of the last update is left. It decides what
the gradients do not determine, and the standard errors tell what that is.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from .records import Equations, Outlier, Update
from .wording import NEGLIGIBLE, STANDARD_ERRORS

#: Iterations at most. They end as soon as all parameters agree.
ITERATIONS = 40
#: Distance of a parameter, relative to its gradient, that always counts as agreement.
AGREEMENT = 0.01
#: Smallest noise that is assumed in rows: rounding of float32 sums, with some margin.
LEAST_NOISE = 1e-8
#: Weight of the last update's gradient, and its standard errors, from which on it is told if p.grad was not
#: cleared.
LEAST_KEPT, KEPT_STANDARD_ERRORS = 1e-6, 20
#: Norms below this are 0.
TINY = 1e-300


def fit_weights(update: Update, former: Update | None) -> None:
    """Find the weight of every pass, its standard error, and the parameters that have other weights.

    Args:
        update: its equations are used, and then dropped.
        former: the optimizer's last update. The passes that it has lost may arrive late. Its equations are
            dropped.
    """
    _Fit(update, former).solve()
    update.equations = _only_lost(update)
    if former is not None:
        former.equations = None


def _only_lost(update: Update) -> Equations:
    """Return only what the next update needs: the sketches of passes that may arrive late.

    All sketches together would split the free memory in which the next window's activations lie.
    """
    assert update.equations is not None
    top = max(map(abs, update.weights), default=0.0)
    lost = [i for i, weight in enumerate(update.weights) if abs(weight) < NEGLIGIBLE * top]
    empty = update.equations.used.new_zeros(0)
    return Equations(update.equations.passes[:, lost], empty, empty, empty)


class _Fit:
    """One fit. Matrices are float64, and on the CPU even if the script has set another default device."""

    def __init__(self, update: Update, former: Update | None) -> None:
        assert update.equations is not None
        self.update, self.former = update, former
        self.equations = update.equations
        self.owners = self.equations.owners
        self.count = int(self.owners.max()) + 1
        self.num_passes = self.equations.passes.shape[1]
        self.eps = torch.finfo(update.dtype).eps

    def solve(self) -> None:
        update, passes, used = self.update, self.equations.passes, self.equations.used
        update.weights, update.errors = [0.0] * self.num_passes, [0.0] * self.num_passes
        if not bool(used.isfinite().all()):
            update.notes.append(
                "the optimizer used gradients with an inf or nan: those updates were not checked"
            )
            return
        if not self.num_passes or not float(used.norm()) or not float(passes.norm()):
            update.rest = 0.0 if self.num_passes and float(passes.norm()) else 1.0
            return
        self._make_system()
        self._find_agreeing()
        self._find_weights()
        if update.rest > max(AGREEMENT, 4 * self.eps) and self._equal_weights_explain():
            return
        for parameter in (self.present & ~self.agree).nonzero().flatten().tolist():
            update.outliers.append(self._outlier(parameter))

    def _norms(self, rows: Tensor) -> Tensor:
        """Return the norm of each parameter's rows."""
        squares = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        return squares.index_add_(0, self.owners, rows.square()).sqrt()

    def _make_system(self) -> None:
        """Put all columns in units of usual weights, and divide rows by their parameter's norm."""
        update, equations = self.update, self.equations
        used = equations.used
        expected = self._expected_weights()
        total, size = float((equations.passes @ expected).norm()), float(equations.passes.norm())
        update.unit = float(used.norm()) / (total if total > 1e-9 * size else size)
        extra = [equations.stale] if float(equations.stale.norm()) else []
        self.has_stale = bool(extra)
        extra += self._late_columns()
        #: Columns whose weights are of interest.
        self.num_judged = self.num_passes + len(extra)
        if equations.decay is not None and float(equations.decay.norm()):
            extra.append(equations.decay)
        self.columns = torch.stack([*(equations.passes * update.unit).T, *extra], 1)
        self.num_extra = len(extra)
        self.prior = torch.cat([expected, expected.new_zeros(len(extra))])
        delivered = self._norms(self.columns[:, : self.num_passes].square().sum(1).sqrt())
        sizes = torch.maximum(self._norms(used), delivered)
        self.present = sizes > 0
        row_scale = torch.where(self.present, 1 / sizes.clamp(min=TINY), 0.0)[self.owners]
        self.matrix = self.columns * row_scale[:, None]
        if self.num_judged < self.columns.shape[1]:
            # A parameter with hardly any gradient would make this column so large that it hides the others.
            size = self.matrix[:, -1].norm().clamp(min=TINY)
            self.matrix[:, -1] /= size
            self.columns[:, -1] /= size
        self.target = used * row_scale
        #: What the prior leaves open.
        self.residual = self.target - self.matrix @ self.prior

    def _expected_weights(self) -> Tensor:
        """Return the prior of the passes. Those of `grad` are only looked at, if there are others."""
        hows = [each.how for each in self.update.passes]
        only_grad = {*hows} == {"grad"}
        values = [float(only_grad or how != "grad") for how in hows]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def _late_columns(self) -> list[Tensor]:
        former = self.former
        if former is None or former.equations is None or former.shapes != self.update.shapes:
            return []
        return list((former.equations.passes * self.update.unit).T)

    @staticmethod
    def _ridge(matrix: Tensor, target: Tensor, weights: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """Return the solution and its standard errors, for rows with this noise and a prior of 0 +- 1."""
        normal = matrix.T @ (matrix * weights[:, None])
        ridge = max(noise**2, 1e-13 * float(normal.diagonal().max()))
        normal += ridge * torch.eye(matrix.shape[1], dtype=matrix.dtype, device="cpu")
        errors = (torch.linalg.inv(normal).diagonal().clamp(min=0) * ridge).sqrt()
        return torch.linalg.solve(normal, matrix.T @ (target * weights)), errors

    def _find_agreeing(self) -> None:
        """Find the parameters that agree on the weights."""
        present = self.present.double()
        trust = present
        for _ in range(ITERATIONS):
            solution, _ = self._ridge(self.matrix, self.residual, trust[self.owners], LEAST_NOISE)
            distance = self._norms(self.residual - self.matrix @ solution)
            floor = max(float(distance[self.present].median()), LEAST_NOISE)
            if float(distance[self.present].max()) < AGREEMENT / 10:
                break
            trust = present * floor / distance.clamp(min=floor)
        self.distance = distance
        self.agree = self.present & (distance <= max(AGREEMENT, 10 * floor))
        self.rows = self.agree[self.owners]
        free = max(1, int(self.rows.sum()) - self.matrix.shape[1])
        left = float((self.residual - self.matrix @ solution)[self.rows].norm()) / math.sqrt(free)
        self.noise = max(self.eps / 4, left)

    def _rest(self, explained: Tensor) -> float:
        """Return the part of the used gradient that is not explained, where parameters agree."""
        if not bool(self.rows.any()):
            return 1.0
        used = self.equations.used[self.rows]
        return float((used - explained[self.rows]).norm() / used.norm().clamp(min=TINY))

    def _find_weights(self) -> None:
        """Fit the agreeing parameters once more, with the noise that was found."""
        update, count = self.update, self.num_passes
        change, errors = self._ridge(self.matrix, self.residual, self.rows.double(), self.noise)
        self.solution = self.prior + change
        update.weights = (self.solution[:count] * update.unit).tolist()
        update.errors = (errors[:count] * update.unit).tolist()
        update.rest = self._rest(self.columns @ self.solution)
        others = list(
            zip(self.solution[count : self.num_judged], errors[count : self.num_judged], strict=True)
        )
        if self.has_stale:
            value, error = map(float, others.pop(0))
            least = NEGLIGIBLE + STANDARD_ERRORS * error
            if update.is_kept:  # so it counts, however little
                least = LEAST_KEPT + KEPT_STANDARD_ERRORS * error
            update.stale_weight = value if abs(value) > least else 0.0
            self._name_stale()
        clear = [
            abs(float(value)) for value, error in others if abs(value) > NEGLIGIBLE + STANDARD_ERRORS * error
        ]
        update.late_weight = max(clear, default=0.0)
        counts = torch.tensor([each.loss.mean_count for each in update.passes], device="cpu")
        factors = torch.tensor([each.loss.factor or 1.0 for each in update.passes], device="cpu")
        runs = torch.tensor([float(each.runs) for each in update.passes], dtype=torch.float64, device="cpu")
        size = self.solution[:count].abs()
        live = size > NEGLIGIBLE * size.max()
        for fair in (runs, runs * counts / factors):
            update.rest_if_fair = min(update.rest_if_fair, self._rest_of_multiple(fair))
            rest = self._rest_of_multiple(fair * live)
            update.rest_if_others_fair = min(update.rest_if_others_fair, rest)

    def _name_stale(self) -> None:
        """Name the parameters that may have gradients of the last update, if others have none."""
        has_stale = self._norms(self.equations.stale) > 0
        if not bool(has_stale[self.present].all()):
            self.update.stale_parameters = [
                name for name, has in zip(self.update.names, has_stale.tolist(), strict=True) if has
            ]

    def _rest_of_multiple(self, weights: Tensor) -> float:
        """Return what the best multiple of some weights of the passes does not explain."""
        rows, count = self.rows, self.num_passes
        others = self.columns[:, count:] @ self.solution[count:]
        total, wanted = self.columns[:, :count] @ weights, self.equations.used - others
        times = float(total[rows] @ wanted[rows] / total[rows].square().sum().clamp(min=TINY))
        return self._rest(total * times + others)

    def _equal_weights_explain(self) -> bool:
        """Try equal weights for each parameter alone, as nearly equal gradients and many outliers need."""
        update = self.update
        expected = self.prior[: self.num_passes]
        even = self.matrix[:, : self.num_passes] @ expected
        products = torch.zeros(self.count, dtype=torch.float64, device="cpu").index_add_(
            0, self.owners, even * self.target
        )
        squares = torch.zeros(self.count, dtype=torch.float64, device="cpu").index_add_(
            0, self.owners, even.square()
        )
        ratios = products / squares.clamp(min=TINY)
        apart = float(self._norms(self.target - even * ratios[self.owners])[self.present].max())
        if apart >= max(1e-3, 2 * self.eps):
            return False
        middle = statistics.median(ratios[self.present].tolist())
        update.weights, update.errors = (expected * middle * update.unit).tolist(), [0.0] * self.num_passes
        update.rest = apart
        update.stale_weight = update.late_weight = 0.0
        update.outliers = [
            Outlier(parameter, ratio / middle)
            for parameter, ratio in enumerate(ratios.tolist())
            if bool(self.present[parameter]) and middle and abs(ratio / middle - 1) > 0.02
        ]
        return True

    def _outlier(self, parameter: int) -> Outlier:
        """Find the weights of a parameter that disagrees with the rest."""
        mine = self.owners == parameter
        matrix, target, num_rows = self.matrix[mine], self.target[mine], int(mine.sum())
        fitted, distance = matrix @ self.solution, float(self.distance[parameter])
        ratio = float(fitted @ target / fitted.square().sum().clamp(min=TINY))
        if float((target - ratio * fitted).norm()) < max(0.1 * distance, 1e-3):
            return Outlier(parameter, ratio)
        ones = torch.ones(num_rows, dtype=matrix.dtype, device="cpu")
        change, _ = self._ridge(matrix, self.residual[mine], ones, 1e-7)
        is_explained = float((self.residual[mine] - matrix @ change).norm()) < 0.1 * distance
        if is_explained and num_rows >= len(change) + 4:
            own, count = self.prior + change, self.num_passes
            relative = (own[:count] / self.solution[:count]).tolist()
            return Outlier(parameter, None, relative, float(own[count]) if self.has_stale else 0.0)
        return Outlier(parameter, None, self._simple_weights(matrix, target, distance))

    def _simple_weights(self, matrix: Tensor, target: Tensor, distance: float) -> list[float]:
        """Try whether one pass counts 0 or 2 times, or one rank alone, if there are too few numbers."""
        count, passes = self.num_passes, self.update.passes
        ranks = {each.rank for each in passes}
        tries = [
            [times if other == one else 1.0 for other in range(count)]
            for one in range(count)
            for times in (0.0, 2.0)
        ]
        if len(ranks) > 1:
            tries += [[float(len(ranks) * (each.rank == rank)) for each in passes] for rank in ranks]
        extra = [1.0] * self.num_extra
        left = [
            float(
                (
                    target
                    - matrix
                    @ (self.solution * torch.tensor([*each, *extra], dtype=matrix.dtype, device="cpu"))
                ).norm()
            )
            for each in tries
        ]
        best = left.index(min(left))
        is_explained = left[best] < min(0.1 * distance, 1e-3) and len(matrix) > 2
        return tries[best] if is_explained else []
