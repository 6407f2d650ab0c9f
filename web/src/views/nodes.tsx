/** Nodes and what they have free: read when the page opens, then pushed by the server with the list of jobs. */
import { useEffect, useState } from "preact/hooks";
import { api } from "../api";
import { age, bytes, firm, plural } from "../format";
import { Empty, ErrorCard, Head, StateChip } from "../parts/basics";
import { jobsStore } from "../store/current";
import { nowMs } from "../store/session";
import type { NodeRow, PilotRow } from "../types";
import { useLoaded } from "./loaded";

/** Pilots are not pushed: they change with the reports of the commands that ask for them. */
const PILOTS_EVERY_MS = 5000;

export function NodesPage() {
  const [nodes, setNodes] = useState<readonly NodeRow[] | null>(null);
  const [pilots, setPilots] = useState<readonly PilotRow[]>([]);
  const { error, guarded } = useLoaded();
  const load = () =>
    guarded(async () => {
      setNodes((await api.nodes()).items);
      setPilots((await api.pilots()).items);
    });
  const pushed = jobsStore.value?.nodes.value ?? null;
  useEffect(() => {
    void load();
    const timer = setInterval(() => document.hidden || void load(), PILOTS_EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  useEffect(() => {
    if (pushed !== null) setNodes(pushed);
  }, [pushed]);
  return (
    <main class="page" id="main">
      <div class="page-head">
        <h1>Nodes</h1>
        {nodes !== null && <span class="muted">{plural(nodes.length, "node")}</span>}
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
          <NodeTable nodes={nodes ?? []} />
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

function NodeTable({ nodes }: { nodes: readonly NodeRow[] }) {
  return (
    <table data-testid="nodes">
      <Head
        columns={[
          "Node",
          "State",
          "Host",
          ["Cores used", "num"],
          ["GPUs", "num"],
          ["Memory", "num"],
          ["Last seen", "num"],
          "Version",
        ]}
      />
      <tbody>
        {nodes.map((node) => (
          <NodeLines key={node.id} node={node} />
        ))}
      </tbody>
    </table>
  );
}

/** A node, and a line for each thing that its agent found wrong with the machine (docs/doctor.md). */
function NodeLines({ node }: { node: NodeRow }) {
  return (
    <>
      <tr>
        <td class="jobname">{node.name}</td>
        <td>
          <StateChip state={node.state} />
        </td>
        <td>{node.host}</td>
        <td class="num">
          {node.cpus_used} / {node.cpus}
        </td>
        <td class="num">{node.gpus}</td>
        <td class="num">{bytes(node.memory_bytes)}</td>
        <td class="num">{node.last_seen_at === null ? "–" : `${age(node.last_seen_at, nowMs.value)} ago`}</td>
        <td class="mono">{node.version}</td>
      </tr>
      {node.findings.map((found) => (
        <tr key={`${node.id} ${found.name}`} data-testid="finding">
          <td />
          <td colSpan={7} class="muted">
            {found.level}: {found.name}: {firm(`${found.detail}. ${found.advice}`)}
          </td>
        </tr>
      ))}
    </>
  );
}
