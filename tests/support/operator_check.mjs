// Reads objects as a JSON list; prints what the Prometheus Operator's validators say of each that is wrong. Argument: their folder.
import { readFileSync } from "node:fs";

const family = "ComGithubPrometheusOperatorPrometheusOperatorPkgApisMonitoringV1";
const wrong = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const { validate } = await import(`${process.argv[2]}/${family}${object.kind}.js`);
  if (!validate(object)) wrong.push(...validate.errors.map((error) => `${object.metadata.name}${error.instancePath}: ${error.keyword}`));
}
console.log(JSON.stringify(wrong));
