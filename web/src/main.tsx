/** Where the page begins: session, routes, the frame around every view. */
import "uplot/dist/uPlot.min.css";
import "./styles/app.css";
import "./styles/dialogs.css";
import "./styles/exchange.css";
import "./styles/job.css";
import "./styles/passes.css";
import "./styles/strip.css";
import "./styles/jobs.css";
import "./styles/facts.css";
import "./styles/why.css";
import "./styles/crash.css";
import "./styles/logs.css";
import "./styles/media.css";
import "./styles/ranks.css";
import "./styles/stacks.css";
import "./styles/token-form.css";
import { effect } from "@preact/signals";
import { render } from "preact";
import { listenToKeys } from "./keyboard";
import { Banners } from "./parts/banners";
import { Empty, ErrorCard, Link } from "./parts/basics";
import { later, PageFrame } from "./parts/later";
import { Overlays } from "./parts/overlays";
import { Top } from "./parts/top";
import { navigate, route } from "./router";
import { stream } from "./socket";
import { followConditions } from "./store/conditions";
import { currentJob, jobsStore } from "./store/current";
import { JobsStore } from "./store/jobs";
import { askSession, session } from "./store/session";
import { exposeForTests } from "./testhooks";
import { JobPage } from "./views/job";
import { JobsPage } from "./views/jobs";
import { LoginPage } from "./views/login";

const NodesPage = later(async () => (await import("./views/nodes")).NodesPage, PageFrame);
const TokensPage = later(async () => (await import("./views/tokens")).TokensPage, PageFrame);
const WebhooksPage = later(async () => (await import("./views/webhooks")).WebhooksPage, PageFrame);

function Page() {
  const at = route.value;
  const current = session.value;
  if (current.state === "out" || at.page === "login") return <LoginPage />;
  if (current.state === "asking") return <main class="page" aria-busy="true" />;
  if (current.state === "unreachable") {
    return (
      <main class="page" id="main">
        <ErrorCard error={current.error} retry={() => void askSession()} />
      </main>
    );
  }
  switch (at.page) {
    case "jobs":
      return <JobsPage />;
    case "nodes":
      return <NodesPage />;
    case "tokens":
      return <TokensPage />;
    case "webhooks":
      return <WebhooksPage />;
    case "job":
      return <JobPage key={at.jobId} jobId={at.jobId} />;
    case "missing":
      return (
        <main class="page" id="main">
          <h1 class="sr">There is no such page</h1>
          <Empty title="There is no such page">
            <span>
              Nothing is at <code>{at.path}</code>.
            </span>
            <Link href="/" class="btn">
              Go to jobs
            </Link>
          </Empty>
        </main>
      );
  }
}

function App() {
  const scrolls = route.value.page === "job" ? "scrolls" : "";
  const offline = stream.lostAt.value === null ? "" : "offline";
  return (
    <div class={`app ${scrolls} ${offline}`} data-testid="app">
      <a class="skip" href="#main">
        Skip to content
      </a>
      <Top />
      <Banners />
      <Page />
      <div class="sr" role="status" aria-live="polite" data-testid="announcer">
        {announcement()}
      </div>
      <Overlays />
    </div>
  );
}

function announcement(): string {
  if (stream.lostAt.value !== null) return "The live connection is lost; reconnecting";
  const job = currentJob.value?.job.value;
  return job ? `${job.name} is ${job.state.toLowerCase()}` : "";
}

effect(() => {
  const job = currentJob.value?.job.value;
  document.title = job ? `${job.name} · ${job.state.toLowerCase()} · Penstock` : "Penstock";
});

effect(() => {
  const inside = session.value.state === "in";
  const store = jobsStore.peek();
  if (inside && store === null) jobsStore.value = new JobsStore();
  if (!inside && store !== null) {
    store.dispose();
    jobsStore.value = null;
  }
});

/** Before the list of jobs, which needs the database. */
let leaveConditions: (() => void) | null = null;
effect(() => {
  const inside = session.value.state === "in";
  if (inside && leaveConditions === null) leaveConditions = followConditions();
  if (!inside && leaveConditions !== null) {
    leaveConditions();
    leaveConditions = null;
  }
});

effect(() => {
  if (session.value.state === "in" && route.value.page === "login") navigate("/", "replace");
});

listenToKeys();
exposeForTests();
if (route.value.page !== "login") void askSession();
const root = document.getElementById("app");
if (root !== null) render(<App />, root);
