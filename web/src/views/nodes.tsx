/** Nodes and what they have free: read when the page opens, then pushed by the server with the list of jobs. */
import { useEffect, useState } from "preact/hooks";
import { api } from "../api";
import { age, bytes, elapsed, firm, percent, plural } from "../format";
import { Empty, ErrorCard, Head, StateChip } from "../parts/basics";
import { Sparkline } from "../parts/sparkline";
import { jobsStore } from "../store/current";
import { mayChangeNodes, nowMs } from "../store/session";
import type { NodeLoad, NodeRow, PilotRow } from "../types";
import { useLoaded } from "./loaded";
import { type Changed, NodeActions } from "./nodeactions";

/** Pilots are not pushed: they change with the reports of the commands that ask for them. */
const PILOTS_EVERY_MS = 5000;
/** Means of minutes are not pushed either. */
const LOADS_EVERY_MS = 15_000;
/** A mean of a minute is shown as the present one for this long after the minute's begin. */
const PRESENT_MS = 150_000;

export function NodesPage() {
  const [nodes, setNodes] = useState<readonly NodeRow[] | null>(null);
  const [pilots, setPilots] = useState<readonly PilotRow[]>([]);
  const [loads, setLoads] = useState<readonly NodeLoad[]>([]);
  const { error, guarded } = useLoaded();
  const loadLoads = () => guarded(async () => setLoads((await api.nodeLoads()).items));
  const load = () =>
    guarded(async () => {
      setNodes((await api.nodes()).items);
      setPilots((await api.pilots()).items);
    });
  const pushed = jobsStore.value?.nodes.value ?? null;
  useEffect(() => {
    void load();
    void loadLoads();
    const timers = [
      setInterval(() => document.hidden || void load(), PILOTS_EVERY_MS),
      setInterval(() => document.hidden || void loadLoads(), LOADS_EVERY_MS),
    ];
    return () => timers.forEach(clearInterval);
  }, []);
  useEffect(() => {
    if (pushed !== null) setNodes(pushed);
  }, [pushed]);
  return (
    <main class="page" id="main">
      <div class="page-head">
        <h1>Nodes</h1>
        {nodes !== null && (
          <span class="muted">
            {plural(nodes.length, "node")}
            {loads.length > 0 && " · processor and memory over the last hour"}
          </span>
        )}
        <span class="grow" />
        <button type="button" class="btn" onClick={() => void load()}>
          Refresh
        </button>
      </div>
      {error !== null && <ErrorCard error={error} retry={() => void load()} />}
      <div class="card">
        {nodes?.length === 0 ? (
          <Empty title="No node has joined">
            <span>Jobs wait until an agent joins. On the machine that should run them:</span>
            <code>penstock agent join</code>
          </Empty>
        ) : (
          <NodeTable
            nodes={nodes ?? []}
            loads={new Map(loads.map((one) => [one.node_id, one]))}
            changed={mayChangeNodes() ? (act) => guarded(act).then(load) : null}
          />
        )}
      </div>
      {pilots.length > 0 && <PilotTable pilots={pilots} />}
    </main>
  );
}

/** Agents that `penstock cluster` asked another scheduler for, and why. */
function PilotTable({ pilots }: { pilots: readonly PilotRow[] }) {
  return (
    <div class="card">
      <table data-testid="pilots">
        <Head columns={["Pilot", "Cluster", "State", "Reason"]} />
        <tbody>
          {pilots.map((pilot) => (
            <tr key={`${pilot.cluster} ${pilot.name}`}>
              <td class="jobname">{pilot.name}</td>
              <td>{pilot.cluster}</td>
              <td>
                <StateChip state={pilot.state} />
              </td>
              <td>{firm(pilot.reason)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

interface Nodes {
  readonly nodes: readonly NodeRow[];
  readonly loads: ReadonlyMap<string, NodeLoad>;
  /** Null for who may not change nodes. */
  readonly changed: Changed | null;
}

function NodeTable({ nodes, loads, changed }: Nodes) {
  return (
    <table data-testid="nodes">
      <Head
        columns={[
          "Node",
          "State",
          ["Host", "tiny-hide"],
          ["Cores used", "num tiny-hide"],
          ["GPUs", "num tiny-hide"],
          ["Processor", "num"],
          ["Memory", "num"],
          ["Last seen", "num tiny-hide"],
          ["Version", "tiny-hide"],
          ...(changed === null ? [] : [{ bar: "Actions" }]),
        ]}
      />
      <tbody>
        {nodes.map((node) => (
          <NodeLines key={node.id} node={node} load={loads.get(node.id) ?? null} changed={changed} />
        ))}
      </tbody>
    </table>
  );
}

interface OneNode {
  readonly node: NodeRow;
  readonly load: NodeLoad | null;
  readonly changed: Changed | null;
}

/** A node, why it takes no jobs, and a line for each thing that its agent found wrong with the machine (docs/doctor.md). */
function NodeLines({ node, load, changed }: OneNode) {
  const columns = changed === null ? 9 : 10;
  const memory = latest(load?.memory_used_bytes, load, nowMs.value);
  const cpu = latest(load?.cpu_percent, load, nowMs.value);
  const at = load?.at.map((one) => Date.parse(one)) ?? [];
  return (
    <>
      <tr>
        <td class="jobname">{node.name}</td>
        <td>
          <StateChip state={node.state} />
        </td>
        <td class="tiny-hide">{node.host}</td>
        <td class="num tiny-hide">
          {node.cpus_used} / {node.cpus}
        </td>
        <td class="num tiny-hide">{node.gpus}</td>
        <td class="num">
          <Sparkline
            at={at}
            values={load?.cpu_percent ?? []}
            bounds={[0, 100]}
            label={`Processor of ${node.name} over the last hour`}
          />
          {cpu === null ? "–" : percent(cpu / 100)}
        </td>
        <td class="num">
          <Sparkline
            at={at}
            values={load?.memory_used_bytes ?? []}
            bounds={[0, node.memory_bytes]}
            label={`Memory of ${node.name} over the last hour`}
          />
          {memory !== null && bytes(memory)}
          <span class={memory === null ? "" : "muted tiny-hide"}>
            {memory === null ? "" : " of "}
            {bytes(node.memory_bytes)}
          </span>
        </td>
        <td class="num tiny-hide">{node.last_seen_at === null ? "–" : `${age(node.last_seen_at, nowMs.value)} ago`}</td>
        <td class="mono tiny-hide">{node.version}</td>
        {changed !== null && (
          <td>
            <NodeActions node={node} changed={changed} />
          </td>
        )}
      </tr>
      {Object.keys(node.labels).length > 0 && (
        <tr data-testid="labels">
          <td colSpan={columns} class="muted finding">
            {Object.entries(node.labels)
              .map(([key, value]) => `${key}=${value}`)
              .join(" · ")}
          </td>
        </tr>
      )}
      {node.state !== "READY" && node.reason_detail !== "" && (
        <tr data-testid="standing">
          <td colSpan={columns} class="muted finding">
            {firm(standing(node, nowMs.value))}
          </td>
        </tr>
      )}
      {node.findings.map((found) => (
        <tr key={`${node.id} ${found.name}`} data-testid="finding">
          <td colSpan={columns} class="muted finding">
            {found.level}: {found.name}: {firm(`${found.detail}. ${found.advice}`)}
          </td>
        </tr>
      ))}
    </>
  );
}

/** Why a node is in its state, and for how long what runs there still has time. */
function standing(node: NodeRow, now: number): string {
  if (node.drain_by === null) return node.reason_detail;
  const left = Math.max(0, (Date.parse(node.drain_by) - now) / 1000);
  const what = `${plural(node.replicas, "replica")} of it still ${node.replicas === 1 ? "runs" : "run"}`;
  return `${node.reason_detail} · ${elapsed(left)} left, ${what}`;
}

/** The newest mean, if it is of now: an unreachable node has none. */
function latest(values: readonly number[] | undefined, load: NodeLoad | null, now: number): number | null {
  const at = load?.at.at(-1);
  return at === undefined || now - Date.parse(at) > PRESENT_MS ? null : (values?.at(-1) ?? null);
}
