"""Mutants of the audit: of what it watches, of its least squares, and of the conditions of its verdicts."""

from mutant import read_mutants

AUDIT_BREAKS = read_mutants(
    r"""
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_first_lost
# the audit tells no lost micro-batches
-        if abs(weight) < limit:
+        if False:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py::test_random_trainings[40]
# the audit forgets that a lost micro-batch counts little beside 1/k too
-        if share and weight:
+        if False:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_doubling
# the audit compares no micro-batches
-            _judge_group(update, group, weights_are_equal, expectations)
+            pass
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k right_ragged_last_batch
# the audit tells a small last micro-batch as uneven
-        if _is_only_last_smaller(passes, usual):
+        if False:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_no_zero_grad
# the audit tells no stale gradients
-    elif weight:
+    elif False:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_late_by_one_window
# the audit tells no late micro-batches
-    if update.late_weight:
+    if False:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_tied_added_twice
# the audit tells no parameters that differ
-    for outlier in update.outliers:
+    for outlier in ():
fusedacc/auditing/verdicts.py: tests/auditing/test_user_code.py -k of_each_parameter
# factors of most parameters are told as a fault of each
-    if multiples > len(update.names) / 2:
+    if False:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_tied_added_twice
# factors of a few parameters are taken for a choice of the script
-    if multiples > len(update.names) / 2:
+    if multiples:
fusedacc/auditing/verdicts.py: tests/auditing/test_cases.py -k bad_zero_grad_before_step
# the audit judges no update without gradients
-        _judge_empty(update)
+        pass
fusedacc/auditing/verdicts.py: tests/auditing/test_user_code.py -k second_optimizer
# the audit excuses what another optimizer counts in an update without gradients
-each.is_counted and top and not (
+each.is_counted and not (
fusedacc/auditing/verdicts.py: tests/auditing/test_what_steps_use.py -k two_optimizers
# the audit excuses lost micro-batches because another optimizer has used them
- and not (each.cleared and each.place in places)
+
fusedacc/auditing/fitting.py: tests/auditing/test_what_steps_use.py -k penalty
# gradients that a penalty looks at count like micro-batches
-[float(only_grad or how != "grad") for how in hows]
+[1.0 for how in hows]
fusedacc/auditing/updates.py: tests/auditing/test_what_steps_use.py -k before_it_uses_them
# the audit judges gradients that a step has changed by itself
-                self._take_given(open_update, step.update)
+                pass
fusedacc/auditing/optimizer_steps.py: tests/auditing/test_what_steps_use.py -k moved_parameters
# passes before an evaluation at moved parameters are told as lost
-            self._excuse_earlier(optimizer)
+
fusedacc/auditing/clearing.py: tests/auditing/test_what_steps_use.py -k repeated
# passes that were cleared together with an inf stay in the fit
-        is_dropped = not all(each.is_finite for each in new)
+        is_dropped = False
fusedacc/auditing/findings.py: tests/auditing/test_report.py -k worst_update
# the factor of a problem is that of its first update
-        self.factor = max((self.factor, problem.factor), key=_distance_from_1)
+
fusedacc/auditing/sums.py: tests/auditing/test_user_code.py -k as_many_outputs
# a number of outputs is taken for a number of micro-batches
-        if self.kind == "sum" and self._divisions() and not self.is_touched:
+        if False:
fusedacc/auditing/sums.py: tests/auditing/test_user_code.py -k short_window
# a short window that is divided twice is right
-            times = times | {self.others.length}
+            pass
fusedacc/auditing/verdicts.py: tests/auditing/test_report.py -k test_steps_demands
# the audit counts no micro-batches
-    if steps and len
+    if False and len
fusedacc/auditing/verdicts.py: tests/auditing/test_user_code.py -k leaks
# the audit tells no backward pass of an evaluation
-    if strange:
+    if False:
fusedacc/auditing/updates.py: tests/auditing/test_user_code.py -k fine_tuned
# the audit takes windows in evaluation mode for evaluations
- if len(evaluating) < len(update.passes) else frozenset()
+
fusedacc/auditing/verdicts.py: tests/auditing/test_ranks.py -k bad_no_ddp
# the audit tells ranks that train alone as lost micro-batches
-    if lost and {passes[i].rank for i in counting} != {each.rank for each in passes}:
+    if False:
fusedacc/auditing/sums.py: tests/auditing/test_cases.py -k bad_divided_twice
# the audit knows no missing division
-        return multiples - {0, 1}
+        return set()
fusedacc/auditing/sums.py: tests/auditing/test_report.py -k bad_last_window_divided_by_k
# the audit knows no window that is not full
-            self.count == others.length
+            True
fusedacc/auditing/sums.py: tests/auditing/test_cases.py -k bad_not_unscaled
# the audit knows no loss scale
-        scales = {each.scale for each in self.passes} - {1.0}
+        scales = set()
fusedacc/auditing/sums.py: tests/auditing/test_cases.py -k bad_step_each
# the audit knows no wrong divisor
-            if is_whole and divisor not in right and explains:
+            if False:
fusedacc/auditing/sums.py: tests/auditing/test_user_code.py -k turns
# the audit wants a sum of 1 from each task of a window
-(self.total, self.total_of_update) if
+(self.total,) if
fusedacc/auditing/sums.py: tests/auditing/test_user_code.py -k divided_by_the_number
# the audit takes a division of a sum by the micro-batches for one by its tokens
-        if count == 1 or self._is_mean_of_sums():
+        if count == 1:
fusedacc/auditing/sums.py: tests/auditing/test_user_code.py -k through_data
# the audit sees a division in a clipping that it cannot see
-        may_be_touched = self.is_touched or are_steady(self.others.factors, 1e-6)
+        may_be_touched = self.is_touched
fusedacc/auditing/wording.py: tests/auditing/test_cases.py -k bad_divided_twice
# the audit tolerates no difference of weights
-TOLERANCE = 0.05
+TOLERANCE = 0.0
fusedacc/auditing/wording.py: tests/auditing/test_cases.py -k bad_last_window
# the audit tolerates every difference of weights
-TOLERANCE = 0.05
+TOLERANCE = 5.0
fusedacc/auditing/fitting.py: tests/auditing/test_cases.py -k bad_part_frozen
# all parameters agree
-(distance <= max(AGREEMENT, 10 * floor))
+(distance <= 1e9)
fusedacc/auditing/fitting.py: tests/auditing/test_cases.py -k bad_part_frozen
# parameters that disagree are trusted like the others
-            trust = present * floor / distance.clamp(min=floor)
+            trust = present
fusedacc/auditing/fitting.py: tests/auditing/test_cases.py -k bad_late_by_one_window
# the former update has lost nothing that can arrive late
-        extra += self._late_columns()
+
fusedacc/auditing/fitting.py: tests/auditing/test_report.py -k with_nan
# gradients with nan are fitted
-        if not bool(used.isfinite().all()):
+        if False:
fusedacc/auditing/watch_state.py: tests/auditing/test_without_effect.py -k test_nothing_is_left
# the audit leaves its wrappers
-            self._undo.pop()()
+            self._undo.pop()
fusedacc/auditing/watch_state.py: tests/auditing/test_user_code.py -k in_place_of
# the audit removes what the script has put in place of its wrappers
-            if getattr(owner, name) is wrapper:
+            if True:
fusedacc/auditing/leaves.py: tests/auditing/test_without_effect.py -k test_nothing_is_left
# the audit leaves its hooks on parameters
-                    handle.remove()
+                    pass
fusedacc/auditing/optimizer_steps.py: tests/auditing/test_user_code.py -k raises_leaves
# a step that raises leaves the audit's hook
-        for step in self._updates.open_steps:  # an exception has ended them
+        for step in ():
fusedacc/auditing/watching.py: tests/auditing/test_without_effect.py -k other_hooks
# the audit removes its hooks of steps inside of one
-        self.watch.close()
+        self.watch.close()
+        self.remove_step_hooks()
fusedacc/auditing/backward_passes.py: tests/auditing/test_user_code.py -k positional
# the arguments of grad() are read as those of backward()
-RETAIN_GRAPH = {"backward": 2, "grad": 3}
+RETAIN_GRAPH = {"backward": 2, "grad": 2}
fusedacc/auditing/loss_scaling.py: tests/auditing/test_ranks.py -k right_ddp_scaler_skips
# an update that a GradScaler skips leaves its micro-batches waiting
-            self._updates.skip_window(optimizer)
-        return result
+            pass
+        return result
fusedacc/auditing/loss_scaling.py: tests/auditing/test_report.py -k with_the_loss_scale
# a clipping that shrinks nothing gets a note too
-        is_clipped = any(self.watch.leaves.clip_factor(param) < 1 for param in params)
+        is_clipped = bool(params)
fusedacc/auditing/updates.py: tests/auditing/test_ranks.py -k but_clipped
# factors of clipping are multiplied from update to update
-        self.watch.leaves.forget_clip_factors(open_update.params)
+
fusedacc/auditing/substitutes.py: tests/auditing/test_ranks.py -k second_model
# the shards of a second model are not found
-            for shard, whole in find_unsharded():
+            for shard, whole in find_unsharded() if not self.watch.leaves._stands_for else ():
fusedacc/auditing/substitutes.py: tests/auditing/test_ranks.py -k step_together
# passes are not kept for an optimizer of shards that has made no update
-                        self.watch.own(each, param)
+                        pass
fusedacc/auditing/clipping.py: tests/auditing/test_user_code.py -k channels_last
# clipping is measured on a copy
-            gradient = local_part(param.grad)
+            gradient = local_part(param.grad).clone()
fusedacc/auditing/backward_passes.py: tests/auditing/test_cases.py -k bad_backward_twice
# a loss that goes through backward() twice is two losses
-        current.repeats = own
+        current.repeats = None
fusedacc/auditing/optimizer_steps.py: tests/auditing/test_user_code.py -k evaluation
# only the last evaluation of a closure counts
-                self._updates.finish(optimizer, step.update)
-                step.update = None
+                step.update = None
fusedacc/auditing/optimizer_steps.py: tests/auditing/test_user_code.py -k before_a_step
# the audit looks at gradients before the optimizer's own hooks
-            if optimizer._optimizer_step_pre_hooks:
+            if False:
fusedacc/auditing/guard.py: tests/auditing/test_without_effect.py -k test_a_failure
# a failure of the audit stops the script
-        except Exception as error:  # whatever it is, the script must go on
+        except ZeroDivisionError as error:
fusedacc/auditing/guard.py: tests/auditing/test_user_code.py -k compiled
# a compiled step() compiles the audit
-    @torch_private.disable_dynamo
+
fusedacc/auditing/optimizers.py: tests/auditing/test_user_code.py -k without_updates_are_forgotten
# sketches wait for an update that never comes
-        if self._num_held > 2 * WAITING_SKETCHES:
+        if False:
fusedacc/auditing/optimizers.py: tests/auditing/test_user_code.py -k has_finished
# an optimizer that has made updates waits for ever
-            if total - record.used_at <
+            if counts[record.number] or total - record.used_at <
fusedacc/auditing/verdicts.py: tests/auditing/test_user_code.py -k too_many
# a window of which passes are missing is judged
-CHECKED_REST_OF_SOME = 0.01
+CHECKED_REST_OF_SOME = 0.5
fusedacc/auditing/optimizers.py: tests/auditing/test_user_code.py -k another_shape
# the shapes of the first parameters stay
-        record.shapes = [tuple(param.shape) for param in params]
+        record.shapes = record.shapes or [tuple(param.shape) for param in params]
fusedacc/auditing/optimizers.py: tests/auditing/test_without_effect.py -k test_memory_is_flat
# sketches of judged updates are kept
-                each.sketches.clear()
+                self._holding.append(each)
fusedacc/auditing/sketches.py: tests/auditing/test_user_code.py -k long_vectors
# signs of a vector take 512 bytes an element
-LONGEST_VECTOR = 2**12
+LONGEST_VECTOR = 2**30
fusedacc/auditing/sketches.py: tests/auditing/test_sketches.py -k test_sketches_of_shards
# all shards begin at the first row
-gradient.device)[first:]
+gradient.device)
fusedacc/auditing/sketches.py: tests/auditing/test_sketches.py -k random_state
# signs are drawn from the script's random numbers
-                    0, 2, (rows, columns), generator=generator, device="cpu", dtype=torch.int8
+                    0, 2, (rows, columns), device="cpu", dtype=torch.int8
fusedacc/auditing/loss.py: tests/auditing/test_cases.py -k bad_mean_of_means
# ignored labels count as tokens
-float(node._saved_self.numel() if total_weight is None else total_weight)
+float(node._saved_self.numel())
fusedacc/auditing/loss.py: tests/auditing/test_cases.py -k bad_not_unscaled_65536
# products with constants end the search for a loss
-name.startswith(("DivBackward", "MulBackward"))
+name.startswith("DivBackward")
fusedacc/auditing/ranks.py: tests/auditing/test_ranks.py -k zero_redundancy
# other parameters of the same shapes are put together
-    return first.shapes == other.shapes and all(
+    return first.shapes == other.shapes or all(
fusedacc/auditing/ranks.py: tests/auditing/test_ranks.py -k other_optimizers
# updates of different optimizers are put together
-                    break  # of different optimizers
+                    pass
fusedacc/auditing/ranks.py: tests/auditing/test_ranks.py -k right_fsdp2_sync_last
# the gradients of shards are not added
-    if first.is_sharded:
+    if False:
fusedacc/auditing/ranks.py: tests/auditing/test_ranks.py -k another_user
# files in another user's folder are read
-        if folder.stat().st_uid != os.getuid():
+        if False:
fusedacc/auditing/running.py: tests/auditing/test_audit_command.py -k future
# the script inherits a future statement
-, dont_inherit=True)
+)
fusedacc/commands/audit.py: tests/auditing/test_audit_command.py -k after_the_audited
# a failure of the script after the audit is hidden
-            has_failed = bool(end.code)
+            has_failed = bool(end.code) and audit.status is None
fusedacc/auditing/session.py: tests/auditing/test_report.py -k two_audits
# two audits run at once
-        if _running is not None:
+        if False:
fusedacc/auditing/session.py: tests/auditing/test_user_code.py -k used_once
# an audit can be used again
-        if self.status is not None:
-            raise RuntimeError("this audit has ended
+        if False:
+            raise RuntimeError("this audit has ended
fusedacc/auditing/session.py: tests/auditing/test_report.py -k ignored_kinds
# ignored kinds are reported
-        self._judge = Judge(steps, scale, frozenset(ignore))
+        self._judge = Judge(steps, scale, frozenset())
fusedacc/auditing/session.py: tests/auditing/test_audit_command.py -k another_folder
# the report's file is in the script's folder
-(path and os.path.abspath(path) for path in (json_file, folder))
+(json_file, folder)
fusedacc/auditing/loss.py: tests/auditing/test_user_code.py -k divided_by_zero
# a loss that is divided by zero stops the audit
-factor / constant if constant else math.inf
+factor / constant
fusedacc/auditing/verdicts.py: tests/auditing/test_user_code.py -k loss_of_zero
# a loss of zero is compared with others
-[i for i in _counting(update) if update.passes[i].loss.factor]
+_counting(update)
fusedacc/auditing/judging.py: tests/auditing/test_several_optimizers.py -k left_in_the_critic
# losses of another optimizer that are left in an update are only a note
-    if others and are_left_over(update, others, findings.first_places.get(place, ())):
+    if False:
fusedacc/auditing/other_losses.py: tests/auditing/test_several_optimizers.py -k all_updates_is_a_note
# losses of another optimizer are left over, whether the first update had them or not
-    return not places & {*first_places} and all(
+    return all(
fusedacc/auditing/updates.py: tests/auditing/test_cases.py -k bad_only_matrices
# gradients of the last update may be in parameters that were cleared
-            if number in record.cleared
+            if False
fusedacc/auditing/fitting.py: tests/auditing/test_cases.py -k shrinks_is_stale
# a gradient that was not cleared, but hardly counts, is not stale
-            if update.is_kept:
+            if False:
fusedacc/auditing/sums.py: tests/auditing/test_cases.py -k bad_contrastive_not_divided
# a factor of the loss's own hides a missing division
-            factor, times = float(count), {count}
+            pass
fusedacc/auditing/doubts.py: tests/auditing/test_doubts.py -k changed
# no note tells gradients from before a change of the parameters
-    if moved and len(moved) < len(counting):
+    if False:
fusedacc/auditing/report_rows.py: tests/auditing/test_several_optimizers.py -k partly
# an update that was checked in part is ok
-    return "partly checked" if update.unmade else "ok"
+    return "ok"
fusedacc/auditing/judging.py: tests/auditing/test_user_code.py -k that_raises_need
# a backward pass that raised is told as lost
-    "failed": "raised
+    "faulty": "raised
"""
)
