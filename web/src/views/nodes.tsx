/** Nodes and what they have free: read when the page opens, then pushed by the server with the list of jobs. */
import { useEffect, useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { age, bytes, plural } from "../format";
import { Empty, ErrorCard, Head, StateChip } from "../parts/basics";
import { jobsStore } from "../store/current";
import { nowMs } from "../store/session";
import type { NodeRow } from "../types";

export function NodesPage() {
  const [nodes, setNodes] = useState<readonly NodeRow[] | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const load = async () => {
    try {
      setNodes((await api.nodes()).items);
      setError(null);
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure);
    }
  };
  const pushed = jobsStore.value?.nodes.value ?? null;
  useEffect(() => void load(), []);
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
    </main>
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
            {found.level}: {found.name}: {found.detail}. {found.advice}
          </td>
        </tr>
      ))}
    </>
  );
}
