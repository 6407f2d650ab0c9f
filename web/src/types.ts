/**
 * What server and page send to each other (docs/protocol.md), by the names that the page uses. All of it is generated
 * from the server's schemas: REST, websocket messages and the graph document.
 */
import type { components } from "./api.d";

type Schemas = components["schemas"];

export type Job = Schemas["Job"];
export type JobCounts = Schemas["JobCounts"];
export type Replica = Schemas["Replica"];
export type MediaSeries = Schemas["MediaSeries"];
export type TableContent = Schemas["TableContent"];
export type HistogramContent = Schemas["HistogramContent"];
export type MediaContent = TableContent | HistogramContent;
export type NodeRow = Schemas["Node"];
export type NodeLoad = Schemas["NodeLoad"];
export type OperatorTimes = Schemas["OperatorTimes"];
export type PilotRow = Schemas["Pilot"];
export type TokenRow = Schemas["Token"];
export type TokenMade = Schemas["TokenMade"];
export type WebhookRow = Schemas["Webhook"];
export type WebhookMade = Schemas["WebhookMade"];
export type WebhookDelivery = Schemas["WebhookDelivery"];
export type EventRow = Schemas["Event"];
export type Advice = Schemas["Advice"];
export type AdvisedCluster = Schemas["AdvisedCluster"];
export type AdvisedSetting = Schemas["AdvisedSetting"];
export type PythonProcess = Schemas["PythonProcess"];
export type FullRecording = Schemas["FullRecording"];
export type PythonStacks = Schemas["PythonStacks"];
export type PythonThread = Schemas["PythonThread"];
export type Diagnosis = Schemas["Diagnosis"];
export type CountedRows = Schemas["CountedRows"];
export type TelemetryCompleteness = Schemas["TelemetryCompleteness"];
export type Finding = Schemas["Finding"];
export type GraphUse = Schemas["GraphUse"];
export type LogChunk = Schemas["LogChunk"];
export type Me = Schemas["Me"];
export type Problem = Schemas["ProblemBody"];

export interface Page<T> {
  readonly items: readonly T[];
  readonly next_page_token: string | null;
}

export type ServerCondition = Schemas["ServerCondition"];
export type ServerMessage = Schemas["ServerMessage"];
export type JobSnapshot = Schemas["JobSnapshot"];
export type Figures = Schemas["Figures"];
export type SeriesDelta = Schemas["Points"];
export type SeriesSet = JobSnapshot["metrics"];

type WholeDocument = Schemas["GraphDocument"];
/** Documents of trainers that record no passes have no such field. */
export type GraphDocument = Omit<WholeDocument, "passes"> & Partial<Pick<WholeDocument, "passes">>;
export type GraphOp = Schemas["Op"];
export type GraphPass = Schemas["Pass"];
