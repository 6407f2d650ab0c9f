/** What is wrong with the whole server, above every view: a newer dashboard, and what it cannot store. */
import { age, clock, firm } from "../format";
import { stream } from "../socket";
import { conditions } from "../store/conditions";
import { outdated } from "../store/release";
import { nowMs } from "../store/session";
import type { ServerCondition } from "../types";

export function Banners() {
  return (
    <>
      {outdated.value && (
        <div class="banner" role="status" data-testid="outdated">
          The server was upgraded and has a newer dashboard: what this page shows may be stale.{" "}
          <button type="button" class="btn small" onClick={() => location.reload()}>
            Reload
          </button>
        </div>
      )}
      {conditions.value.map((one) => (
        <ConditionBanner key={one.code} condition={one} />
      ))}
    </>
  );
}

function ConditionBanner({ condition }: { condition: ServerCondition }) {
  const known = stream.lostAt.value === null;
  return (
    <div class="banner condition" role="alert" data-testid="condition">
      <i class="dot bad" />
      <p>
        <b>{condition.summary}</b> since {clock(condition.since)}
        {/* Hidden from screen readers: an alert that changes every second would be read every second. */}
        {known && <span aria-hidden="true">{firm(` (${age(condition.since, nowMs.value)})`)}</span>}:{" "}
        <span class="cause">{condition.detail}</span>
      </p>
      <p>
        {condition.meanwhile} {condition.advice}
      </p>
    </div>
  );
}
