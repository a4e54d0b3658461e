// Reads objects as a JSON list; prints what the Prometheus Operator's validators say of each that is wrong. Argument: their folder.
import { readFileSync } from "node:fs";

const family = "ComGithubPrometheusOperatorPrometheusOperatorPkgApisMonitoring";
const wrong = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const version = object.apiVersion.split("/")[1];
  const { validate } = await import(`${process.argv[2]}/${family}${version[0].toUpperCase()}${version.slice(1)}${object.kind}.js`);
  if (!validate(object)) wrong.push(...validate.errors.map((error) => `${object.metadata.name}${error.instancePath}: ${error.keyword}`));
}
console.log(JSON.stringify(wrong));
