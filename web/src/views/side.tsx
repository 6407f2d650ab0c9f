/** The side panel: the selection, waits, the loss, and the processes of the job. */

import { bytes, compact, integer, metric, millis, nanos, percent, plural, shape } from "../format";
import type { GraphController } from "../graph/controller";
import { bucketOf, type Group, type LogicalOp, modulesOf } from "../graph/group";
import { usesIn } from "../graph/uses";
import { Head, Link } from "../parts/basics";
import { Chart } from "../parts/chart";
import { jobHref, setQuery } from "../router";
import { isTerminal, type JobStore } from "../store/job";
import { ODD, spreadOf } from "../store/layers";
import { type GraphRuntime, longestOf, sumOf } from "../store/ops";
import { behindAt, behindOf } from "../store/staleness";
import type { GraphDocument, GraphOp } from "../types";
import { exchangeOf, hasPservers, PserverSummary } from "./exchange";
import type { JobParts } from "./job";
import { PassPanel } from "./passes";
import { ReplicaList } from "./replicas";
import { shownSyncRows, syncBytes, useByWait } from "./sync";

export function SidePanel({ parts, what }: { parts: JobParts; what: "all" | "operator" }) {
  const { store } = parts;
  const job = store.job.value;
  return (
    <aside class="side" aria-label="Details">
      <Selection parts={parts} />
      {what === "all" && <PserverSummary store={store} />}
      {what === "all" && <SyncSummary store={store} />}
      {what === "all" && <Spark store={store} name="loss" title="Loss" text={metric} />}
      {what === "all" && <Spark store={store} name="samples_per_s" title="Samples/s" text={compact} />}
      {what === "all" && job !== null && job.replicas.length > 0 && (
        <div>
          <h2>Registered</h2>
          <ReplicaList replicas={job.replicas.filter((one) => one.attempt === job.attempt)} />
        </div>
      )}
    </aside>
  );
}

function Selection({ parts }: { parts: JobParts }) {
  const { store, graph } = parts;
  graph.layoutVersion.value;
  store.opsVersion.value;
  if (store.stage.value !== null) return <PassPanel store={store} graph={graph} stage={store.stage.value} />;
  const runtime = store.shownRuntime.value;
  const index = graph.hovered.value >= 0 && graph.selected < 0 ? graph.hovered.value : graph.selected;
  const box = graph.layout?.boxes[index];
  if (runtime?.document == null) return null;
  if (box === undefined) return <Hottest runtime={runtime} graph={graph} />;
  const ops = box.op?.ops ?? box.group.ops;
  if (box.op === null && box.group.members.length > 1)
    return <GroupFacts graph={graph} box={index} runtime={runtime} />;
  return <OperatorFacts ops={ops} member={box.op} runtime={runtime} graph={graph} />;
}

function OperatorFacts({
  ops,
  member,
  runtime,
  graph,
}: {
  ops: readonly number[];
  member: LogicalOp | null;
  runtime: GraphRuntime;
  graph: GraphController;
}) {
  const document = runtime.document;
  const index = ops[0] ?? -1;
  const op = document?.ops[index];
  if (document === null || op === undefined) return null;
  const { total, count, max, share } = sumOf(runtime, ops);
  const critical = ops.some((one) => graph.critical.ops.has(one));
  return (
    <div data-testid="operator-panel">
      <h2>
        <span>
          <i class={`swatch c-${bucketOf(op)}`} />
          {member?.name ?? op.name}
        </span>
        <span class="mono clip">{ops.length > 4 ? `${integer(ops.length)} runs` : `#${ops.join(" #")}`}</span>
      </h2>
      <dl>
        <dt>type</dt>
        <dd>{op.type}</dd>
        <dt>module</dt>
        <dd>{modulesOf(document)[index] || "–"}</dd>
        <dt>role</dt>
        <dd>{op.role}</dd>
        <Values name="in" values={op.inputs} />
        <Values name="out" values={op.outputs} />
        <UsedRows graph={graph} document={document} op={index} />
        <dt>bytes</dt>
        <dd>{op.bytes === 0 ? "–" : bytes(op.bytes)}</dd>
        <Staleness store={graph.store} document={document} ops={ops} />
        <dt>line</dt>
        <dd>{op.source || "–"}</dd>
        <dt>mean · max</dt>
        <dd>{count === 0 ? "has not run" : `${nanos(total / count)} · ${nanos(max)}`}</dd>
        <Percentiles runtime={runtime} ops={ops} />
        <dt>ran</dt>
        <dd>{integer(count)} × since the dashboard opened</dd>
        <Layers runtime={runtime} ops={ops} folded={member?.module ?? ""} />
        {op.flops > 0 && count > 0 && <Rate op={op} meanNs={total / count} />}
        <dt>critical</dt>
        <dd class={critical ? "critical" : ""}>
          {critical ? `yes, ${percent(share)} of operator time` : `no · ${percent(share)} of operator time`}
        </dd>
      </dl>
    </div>
  );
}

/** The operators that it waits for, and those that wait for it, to go to. */
function UsedRows({ graph, document, op }: { graph: GraphController; document: GraphDocument; op: number }) {
  if (graph.layout === null) return null;
  const { producers, consumers } = usesIn(document, graph.layout, op);
  return (
    <>
      <Used name="waits for" ops={producers} document={document} />
      <Used name="used by" ops={consumers} document={document} />
    </>
  );
}

function Used({ name, ops, document }: { name: string; ops: readonly number[]; document: GraphDocument }) {
  if (ops.length === 0) return null;
  const shown = ops.slice(0, 4);
  return (
    <>
      <dt>{name}</dt>
      <dd class="used" data-testid={name.replace(" ", "-")}>
        {shown.map((one) => (
          <button
            key={one}
            type="button"
            class="linkish"
            title={document.ops[one]?.module}
            onClick={() => setQuery({ op: String(one) })}
          >
            {document.ops[one]?.name}
          </button>
        ))}
        {ops.length > shown.length && <span class="faint">and {ops.length - shown.length} more</span>}
      </dd>
    </>
  );
}

/** How old the parameters are that an operator of a job with parameter servers reads. */
function Staleness(props: { store: JobStore; document: GraphDocument; ops: readonly number[] }) {
  if (!hasPservers(props.store)) return null;
  const behind = behindAt(props.document, props.ops, behindOf(exchangeOf(props.store)));
  return (
    <>
      <dt>staleness</dt>
      <dd>{Number.isNaN(behind) ? "not measured" : `${compact(behind)} updates by others`}</dd>
    </>
  );
}

/** What repeated layers take, and the odd one out. */
function Layers({ runtime, ops, folded }: { runtime: GraphRuntime; ops: readonly number[]; folded: string }) {
  const { document } = runtime;
  const spread = document === null ? null : spreadOf(runtime, ops, folded, modulesOf(document));
  if (spread === null) return null;
  const times = spread.medianNs > 0 ? spread.maxNs / spread.medianNs : 1;
  return (
    <>
      <dt>layers</dt>
      <dd>
        {integer(spread.count)}: {nanos(spread.minNs)} · {nanos(spread.medianNs)} · {nanos(spread.maxNs)}
      </dd>
      <dt>slowest</dt>
      <dd class={times > ODD ? "critical" : ""}>
        {spread.slowest.split(".").slice(-2).join(".")}
        {times > ODD ? ` · ${times.toFixed(1)} × the median` : ""}
      </dd>
    </>
  );
}

/** Of the runs in sampled steps; every step that is slower than most is sampled. */
function Percentiles({ runtime, ops }: { runtime: GraphRuntime; ops: readonly number[] }) {
  const spread = runtime.durations.of(ops);
  if (spread === null) return null;
  return (
    <>
      <dt>p50 · p99</dt>
      <dd data-testid="percentiles" title="within 4.5 %; every step that is slower than most is sampled">
        {nanos(spread.p50)} · {nanos(spread.p99)} <span class="faint">of {integer(spread.runs)} sampled</span>
      </dd>
    </>
  );
}

function Rate({ op, meanNs }: { op: GraphOp; meanNs: number }) {
  return (
    <>
      <dt>rate</dt>
      <dd>{compact(op.flops / meanNs)} Gflop/s</dd>
    </>
  );
}

function Values({ name, values }: { name: string; values: GraphOp["inputs"] }) {
  if (values.length === 0) return null;
  const shown = values.slice(0, 4);
  return (
    <>
      <dt>{name}</dt>
      <dd>
        {shown.map((value) => (
          <div key={value.name} title={value.name}>
            {shape(value.dtype, value.shape)}
          </div>
        ))}
        {values.length > shown.length && <span class="faint">and {values.length - shown.length} more</span>}
      </dd>
    </>
  );
}

function GroupFacts({ graph, box, runtime }: { graph: GraphController; box: number; runtime: GraphRuntime }) {
  const group = graph.layout?.boxes[box]?.group;
  if (group === undefined) return null;
  const { share } = sumOf(runtime, group.ops);
  const members = longestOf(runtime, group.members, (member) => member.ops, 6).map((member) => ({
    member,
    ...sumOf(runtime, member.ops),
  }));
  const opened = graph.expanded.value.has(group.id);
  return (
    <div data-testid="group-panel">
      <h2>
        <span>
          <i class={`swatch c-${group.bucket}`} />
          {group.label}
        </span>
        <button type="button" class="btn small" onClick={() => graph.toggle(group.id)}>
          {opened ? "Collapse" : "Expand"}
        </button>
      </h2>
      <p class="muted" style={{ fontSize: "12px" }}>
        {plural(group.members.length, "operator")} · {percent(share)} of operator time
        {group.module !== "" ? ` · ${group.module}` : ""}
      </p>
      <dl>
        <Layers runtime={runtime} ops={group.ops} folded={group.module} />
      </dl>
      <table>
        <tbody>
          {members.map(({ member, total, count }) => (
            <tr key={member.id}>
              <td>
                <button type="button" class="linkish" onClick={() => setQuery({ op: String(member.ops[0] ?? 0) })}>
                  {member.name}
                </button>
              </td>
              <td class="num">{count === 0 ? "–" : nanos(total / count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Hottest({ runtime, graph }: { runtime: GraphRuntime; graph: GraphController }) {
  // Groups are looked for afterwards: an object for each of 20 000 members would be garbage four times a second.
  const members = graph.groups.flatMap((group) => group.members);
  const top = longestOf(runtime, members, (member) => member.ops, 6).map((member) => ({
    member,
    group: graph.groups.find((group) => group.members.includes(member)) as Group,
    ...sumOf(runtime, member.ops),
  }));
  return (
    <div data-testid="hottest">
      <h2>
        <span>{runtime.trains === false ? "Where the time goes, evaluation" : "Where the time goes"}</span>
        <span class="faint">mean · share</span>
      </h2>
      {runtime.sumNs === 0 ? (
        <p class="muted">No operator has reported yet.</p>
      ) : (
        <table>
          <tbody>
            {top.map(({ group, member, total, count, share }) => (
              <tr key={member.id}>
                <td>
                  <i class={`swatch c-${group.bucket}`} />
                  <button
                    type="button"
                    class="linkish"
                    onClick={() => setQuery({ op: String(member.ops[0] ?? 0) })}
                    title={member.name}
                  >
                    {member.type}
                  </button>{" "}
                  <span class="faint">{group.label}</span>
                </td>
                <td class="num">{nanos(total / count)}</td>
                <td class="num">{percent(share)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}

function SyncSummary({ store }: { store: JobStore }) {
  const rows = useByWait(shownSyncRows(store));
  if (rows.length === 0) return null;
  const top = rows.slice(0, 5);
  const most = Math.max(1, ...top.map((row) => row.waitNs));
  const job = store.job.value;
  return (
    <div data-testid="sync-summary">
      <h2>
        <span>{job !== null && isTerminal(job) ? "Gradient sync" : "Gradient sync, last 10 s"}</span>
        {job !== null && (
          <Link href={jobHref(job.id, "sync")} class="faint">
            all {rows.length}
          </Link>
        )}
      </h2>
      <table>
        <Head columns={["parameter", ["bytes", "num"], ["wait", "num"], { bar: "wait, as a bar" }]} />
        <tbody>
          {top.map((row) => (
            <tr key={row.index}>
              <td class="mono clip" style={{ maxWidth: "130px" }} title={row.parameter}>
                {row.parameter}
              </td>
              <td class="num">{syncBytes(row)}</td>
              <td class="num">{millis(row.waitNs)}</td>
              <td class="meter-cell">
                <i class="meter" style={{ width: `${(row.waitNs / most) * 100}%` }} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Spark(props: { store: JobStore; name: string; title: string; text: (value: number) => string }) {
  props.store.metricsVersion.value;
  const latest = props.store.series.latest(props.name);
  if (latest === undefined) return null;
  return (
    <div>
      <h2>
        <span>{props.title}</span>
        <span class="mono">{props.text(latest)}</span>
      </h2>
      <div class="spark">
        <Chart store={props.store} base={props.name} height={74} compact />
      </div>
    </div>
  );
}
